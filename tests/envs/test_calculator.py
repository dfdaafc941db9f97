"""The calculator: its questions, its reward, its demonstrations, and its workflow run as in training.

- No operand of the test split occurs in the train split or the demonstrations; both splits use every digit
  everywhere.
- A question, its Python and its answer agree, and results have five digits. One seed gives one set of tasks.
- The last number of the final message is the answer, and a program must have printed it; signs count.
- About three in ten demonstrations earn the reward; every number in them is a copy; results are what programs print.
- The workflow: a program, its output and the answer are rewarded; a failed program may be repaired; several calls in
  one message are all answered; it ends after MAX_TURNS; a malformed call is text, and a wrong answer.
"""

import json
import random
import re
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import pytest

from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Status, Trajectory
from envs.calculator.demonstrations import HABITS, Conversation, answers, demonstrations, repairs
from envs.calculator.reward import last_number, score
from envs.calculator.tasks import (
    NUM_RESULT_DIGITS,
    NUM_TASKS,
    WORDS,
    Split,
    draw_question,
    draw_text,
    is_held_out,
    load,
)
from envs.calculator.workflow import MAX_TURNS, USAGE, solve
from sandboxes import open_pool
from tests.envs.stage import END, Play, open_stage, renderer_of, told


def operands(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def question_of(task: dict) -> str:
    (message,) = task["messages"]
    assert message["role"] == "user"
    return message["content"]


@pytest.mark.parametrize(("split", "held_out"), [("train", False), ("test", True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_operand_values_belong_to_one_split(split: Split, held_out: bool, seed: int) -> None:
    for task in load(split, seed, 500):
        assert all(is_held_out(operand) is held_out for operand in operands(question_of(task)))


def test_demonstrations_use_no_held_out_operand() -> None:
    for conversation in islice(demonstrations(0), 500):
        assert not any(map(is_held_out, operands(conversation[0]["content"])))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_digit_in_every_place(split: Split) -> None:
    numbers = {str(number) for task in load(split, 0, 1000) for number in operands(question_of(task))}
    for length in (2, 3):
        for place in range(length):
            digits = {number[place] for number in numbers if len(number) == length}
            assert digits == set("123456789" if place == 0 else "0123456789")


def test_about_one_value_in_five_is_held_out() -> None:
    assert 0.17 < sum(map(is_held_out, range(10, 1000))) / 990 < 0.23


def test_expression_and_answer_agree() -> None:
    rng = random.Random(0)
    for _ in range(200):
        question = draw_question(rng, "train")
        assert eval(question.expression) == question.answer


def test_results_have_five_digits() -> None:
    assert {len(task["answer"].lstrip("-")) for task in load("test", 0, 500)} == {NUM_RESULT_DIGITS}


def test_a_text_asks_for_its_expression() -> None:
    rng = random.Random(0)
    for _ in range(100):
        question = draw_question(rng, "test")
        text = draw_text(rng, question)
        for word, sign in (("plus", "+"), ("minus", "-"), ("times", "*")):
            text = text.replace(word, sign)
        assert question.expression in text


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert load("train", 3, 50) == load("train", 3, 50)
    assert load("train", 3, 50) != load("train", 4, 50)


def test_ids_are_unique() -> None:
    tasks = [*load("train", 0), *load("test", 0)]
    assert len({task["id"] for task in tasks}) == len(tasks) == sum(NUM_TASKS.values())


@pytest.mark.parametrize("num", [0, -1])
def test_too_few_tasks_are_refused(num: int) -> None:
    with pytest.raises(ValueError, match=f"num is {num}; give at least 1"):
        load("train", 0, num)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split is 'dev'; valid: 'train', 'test'"):
        load("dev", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "outputs", "earned"),
    [
        ("The answer is 71625.", ["71625"], 1.0),
        ("348 plus 27, times 191: 71625", ["71625\n"], 1.0),
        ("The answer is 71625.", ["SyntaxError: invalid syntax", "71625"], 1.0),
        ("The answer is 71625.", ["the result is 71625"], 1.0),
        ("The answer is 71625.", [], 0.0),
        ("The answer is 71625.", ["71626"], 0.0),
        ("The answer is 71626.", ["71625"], 0.0),
        ("It worked.", ["71625"], 0.0),
        ("", ["71625"], 0.0),
        ("The answer is 171625.", ["71625"], 0.0),
        ("The answer is 716250.", ["71625"], 0.0),
        ("The answer is -71625.", ["-71625"], 0.0),
        ("71625 or 71626", ["71625"], 0.0),
    ],
)
def test_score(said: str, outputs: list[str], earned: float) -> None:
    assert score(said, outputs, "71625") == earned


def test_a_negative_answer() -> None:
    assert score("The answer is -61773.", ["-61773"], "-61773") == 1.0
    assert score("The answer is 61773.", ["-61773"], "-61773") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [("", None), ("none", None), ("-7", "-7"), ("3-7", "7"), ("print(8) -> 8.", "8"), ("0012", "0012")],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


NUMBER = re.compile(r"\d+")


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return list(islice(demonstrations(0), 2000))


def programs(conversation: Conversation) -> list[str]:
    calls = [call for message in conversation for call in message.get("tool_calls", [])]
    return [json.loads(call["function"]["arguments"])["code"] for call in calls]


def outputs(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation if message["role"] == "tool"]


def answer_to(question: str) -> str:
    for sign, word in WORDS.items():
        question = question.replace(word, sign)
    (expression,) = re.findall(r"[(\d].*\d", question)
    return str(eval(expression))


def spoken(message: dict[str, Any]) -> str:
    return message["content"] + json.dumps(message.get("tool_calls", []))


def test_habits_are_all_there_is() -> None:
    assert sum(HABITS.values()) == pytest.approx(1.0)


def test_about_three_in_ten_are_right(conversations: list[Conversation]) -> None:
    earned = [score(c[-1]["content"], outputs(c), answer_to(c[0]["content"])) for c in conversations]
    assert sum(earned) / len(earned) == pytest.approx(HABITS[answers] + HABITS[repairs], abs=0.04)
    assert HABITS[answers] + HABITS[repairs] < 0.4


def test_every_number_is_a_copy(conversations: list[Conversation]) -> None:
    for conversation in conversations:
        seen: set[str] = set()
        for message in conversation:
            numbers = set(NUMBER.findall(spoken(message)))
            assert message["role"] != "assistant" or numbers <= seen
            seen |= numbers


def test_a_result_is_what_the_program_prints(conversations: list[Conversation]) -> None:
    for conversation in conversations:
        for program, output in zip(programs(conversation), outputs(conversation), strict=True):
            if program.endswith(")") and program.count("(") == program.count(")"):
                assert str(eval(program.removeprefix("print"))) == output


async def test_a_failure_reads_as_a_sandbox_tells_it(conversations: list[Conversation]) -> None:
    failed = [c for c in conversations if outputs(c) and outputs(c)[0].startswith("SyntaxError")][:3]
    assert failed
    async with open_pool(backend="subprocess") as pool, pool.acquire() as sandbox:
        for conversation in failed:
            result = await sandbox.exec_python(programs(conversation)[0])
            assert result.stderr.decode().strip().splitlines()[-1] == outputs(conversation)[0]


def test_the_same_seed_gives_the_same_conversations(conversations: list[Conversation]) -> None:
    assert list(islice(demonstrations(0), 50)) == conversations[:50]
    assert list(islice(demonstrations(1), 50)) != conversations[:50]


TASK = {"id": "t", "messages": [{"role": "user", "content": "What is (348 + 27) * 191?"}], "answer": "71625"}


def program(code: str) -> str:
    return f'<tool_call>{{"name": "python", "arguments": {json.dumps({"code": code})}}}</tool_call>{END}'


GOOD = program("print((348 + 27) * 191)")
ANSWER = f"The answer is 71625.{END}"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_of(demonstrations(0), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def play(renderer: Renderer) -> AsyncIterator[Play]:
    """`await play(*texts)`: the workflow of this environment, which completes."""
    async with open_stage(renderer, TASK) as on_stage:

        async def play(*texts: str, wall_s: float = 5.0) -> Trajectory:
            trajectory = await on_stage(solve, *texts, wall_s=wall_s, timeout_s=30.0)
            assert trajectory.status is Status.COMPLETED, trajectory.error
            return trajectory

        yield play


async def test_a_program_and_its_answer(play: Play) -> None:
    trajectory = await play(GOOD, ANSWER)
    assert told(trajectory) == ["71625"]
    assert trajectory.rewards.final == 1.0
    assert len(trajectory.turns) == 2


async def test_the_second_turn_continues_the_first(play: Play) -> None:
    first, second = (await play(GOOD, ANSWER)).turns
    assert (second.parent, second.fork_reason) == (first.completions[0].id, None)


@pytest.mark.parametrize(
    "texts",
    [(ANSWER,), (GOOD, f"The answer is 71626.{END}"), (GOOD, f"It worked.{END}"), (f"I cannot do that.{END}",)],
    ids=["no program", "wrong number", "no number", "refusal"],
)
async def test_not_rewarded(play: Play, texts: tuple[str, ...]) -> None:
    assert (await play(*texts)).rewards.final == 0.0


async def test_a_failed_program_may_be_repaired(play: Play) -> None:
    trajectory = await play(program("print((348 + 27) * 191"), GOOD, ANSWER)
    assert told(trajectory) == ["SyntaxError: '(' was never closed", "71625"]
    assert trajectory.rewards.final == 1.0


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("pass", ""),
        ("import os; os._exit(3)", "Error: nonzero"),
        ("print(1); print(2)", "1\n2"),
    ],
)
async def test_what_a_program_does_is_told(play: Play, code: str, output: str) -> None:
    assert told(await play(program(code), ANSWER)) == [output]


async def test_a_program_that_runs_too_long(play: Play) -> None:
    trajectory = await play(program("while True: pass"), GOOD, ANSWER, wall_s=0.2)
    assert told(trajectory) == ["Error: timeout", "71625"]
    assert trajectory.rewards.final == 1.0


@pytest.mark.parametrize(
    "call",
    ['{"name": "bash", "arguments": {"code": "ls"}}', '{"name": "python", "arguments": {"code": 5}}'],
    ids=["another tool", "no program"],
)
async def test_a_call_that_is_no_program_is_told_so(play: Play, call: str) -> None:
    trajectory = await play(f"<tool_call>{call}</tool_call>{END}", GOOD, ANSWER)
    assert told(trajectory) == [USAGE, "71625"]


async def test_several_calls_are_all_answered(play: Play) -> None:
    assert told(await play(program("print(1)").removesuffix(END) + GOOD, ANSWER)) == ["1", "71625"]


async def test_it_ends_after_max_turns(play: Play) -> None:
    trajectory = await play(*[GOOD] * (MAX_TURNS + 1))
    assert (len(trajectory.turns), trajectory.rewards.final) == (MAX_TURNS, 0.0)


async def test_a_malformed_call_is_a_wrong_answer(play: Play) -> None:
    trajectory = await play(f'<tool_call>{{"name": "python" 71625</tool_call>{END}')
    assert (len(trajectory.turns), trajectory.rewards.final) == (1, 0.0)
