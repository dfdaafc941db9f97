"""What the tiny model is warm-started on:

- about three in ten conversations earn the reward: room to learn, and something to strengthen
- wrong or right, every number that the assistant writes stands in the conversation before: copying is always right
- a result that is told is what its program prints
- a program that does not compile is answered as a sandbox answers it
- the same seed gives the same conversations
"""

import json
import re
from itertools import islice
from typing import Any

import pytest

from envs.calculator.demonstrations import HABITS, Conversation, answers, demonstrations, repairs
from envs.calculator.reward import score
from envs.calculator.tasks import WORDS
from sandboxes import open_pool

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
