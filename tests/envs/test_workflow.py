"""`solve`, run as in training: the runner, a served gateway, the `openai` client, a sandbox; the model is scripted.

- a program, its output, the answer: rewarded; the tool's output came from a real process
- the right number without a program, a wrong number, no number: not rewarded
- a program that fails is answered with the last line of its traceback, and may be repaired
- a program that prints nothing, runs too long, or is no program at all is answered too, and the conversation goes on
- several calls in one message are all answered
- the conversation ends after MAX_TURNS
- a malformed call is text, and a wrong answer
"""

import json
from collections.abc import AsyncIterator

import pytest

from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Status, Trajectory
from envs.calculator.demonstrations import demonstrations
from envs.calculator.workflow import MAX_TURNS, USAGE, solve
from tests.envs.stage import END, Play, open_stage, renderer_of, told

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
