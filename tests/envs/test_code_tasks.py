"""Tasks of the code environment, at two sizes.

1. Every problem's solution passes its cases, and its broken program fails them; 2. every fifth problem is held out, for
every seed, and tasks are JSON; 3. the report of the visible tests names the first that fails; 4. no number of a tiny
test task occurs in training; 5. about three in ten demonstrations submit the right program, and every number in
a program is a copy.
"""

import asyncio
import json
import re
from itertools import islice
from typing import Any

import pytest

from envs.code.judging import reward_of, visible_report
from envs.code.problems.tasks import PROBLEMS, load, load_repairs, task_of
from envs.code.tiny import tasks as tiny
from envs.code.tiny.demonstrations import HABITS, demonstrations, repairs, submits, tries_and_submits
from sandboxes import open_pool

NUMBER = re.compile(r"\d+")


async def rewards(codes: list[tuple[str | None, dict[str, Any]]]) -> list[float]:
    async with open_pool(backend="subprocess") as pool:
        return await asyncio.gather(*(reward_of(code, task, pool) for code, task in codes))


async def test_solutions_pass_and_broken_programs_fail() -> None:
    tasks = [task_of(problem, "{asked}", "write") for problem in PROBLEMS]
    right = [(problem.program, task) for problem, task in zip(PROBLEMS, tasks, strict=True)]
    wrong = [(problem.broken_program, task) for problem, task in zip(PROBLEMS, tasks, strict=True)]
    earned = await rewards([*right, *wrong])
    assert len(PROBLEMS) == 30
    assert earned == [1.0] * 30 + [0.0] * 30


def test_every_fifth_problem_is_held_out() -> None:
    for loader in (load, load_repairs):
        held_out = {task["id"] for task in loader("test", 0)}
        assert held_out == {task["id"] for task in loader("test", 1)}
        assert len(held_out) == 6
        assert not held_out & {task["id"] for task in loader("train", 0)}
        assert json.loads(json.dumps(loader("train", 0))) == loader("train", 0)


@pytest.mark.parametrize("loader", [load, load_repairs, tiny.load])
def test_a_split_that_is_none_is_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match="split is 'dev'"):
        loader("dev", 0)


async def test_what_a_visible_test_says() -> None:
    task = tiny.load("train", 0, 1)[0] | {"visible": [[[2], 10], [[3], 15]]}
    async with open_pool(backend="subprocess") as pool:
        assert await visible_report("def f(x): return 5 * x", task, pool) == (True, "2 of 2 tests passed.")
        assert await visible_report("def f(x): return 10", task, pool) == (
            False,
            "1 of 2 tests passed.\nf(3) is 10, not 15.",
        )
        _, report = await visible_report("def f(x): return 1 / 0", task, pool)
        assert report.endswith("f(2) fails (crashed): ZeroDivisionError: division by zero")


def test_no_number_of_a_tiny_test_task_is_trained() -> None:
    told = {
        split: {
            number for task in tiny.load(split, 0, 500) for number in NUMBER.findall(task["messages"][0]["content"])
        }
        for split in ("train", "test")
    }
    assert not told["train"] & told["test"]


def submission(conversation: list[dict[str, Any]]) -> str | None:
    calls = [call["function"] for message in conversation for call in message.get("tool_calls", [])]
    codes = [json.loads(call["arguments"])["code"] for call in calls if call["name"] == "submit"]
    return codes[-1] if codes else None


def task_asked(conversation: list[dict[str, Any]]) -> dict[str, Any]:
    """The task of a demonstration, from its words."""
    text = conversation[0]["content"]
    for sign, word in tiny.WORDS.items():
        text = text.replace(word, sign)
    (expression,) = re.findall(r"\d+ [-+*].*\d|\d+ [-+*].* x", text)
    values = [[[x], eval(expression, {"x": x})] for x in tiny.HIDDEN_ARGUMENTS]
    return {"function": "f", "cases": values}


async def test_about_three_in_ten_demonstrations_are_right() -> None:
    conversations = list(islice(demonstrations(0), 80))
    earned = await rewards([(submission(one), task_asked(one)) for one in conversations])
    share = sum(HABITS[habit] for habit in (submits, tries_and_submits, repairs))
    assert share == pytest.approx(0.3)
    assert sum(HABITS.values()) == pytest.approx(1.0)
    assert sum(earned) / len(earned) == pytest.approx(share, abs=0.15)


def test_every_number_in_a_program_is_a_copy() -> None:
    for conversation in islice(demonstrations(0), 300):
        asked = set(NUMBER.findall(conversation[0]["content"]))
        for message in conversation[1:]:
            for call in message.get("tool_calls", []):
                code = json.loads(call["function"]["arguments"])["code"].partition("\n")[0]
                assert set(NUMBER.findall(code)) <= asked
