"""The code environment at two sizes; the model is scripted, the sandboxes are real.

- Every problem's solution passes its cases, and its broken program fails them. Every fifth problem is held out.
- The report of the visible tests names the first that fails.
- No number of a tiny test task occurs in training; three in ten demonstrations are right, and their numbers are copies.
- `write`: hidden cases judge a submission; tool outputs are read on the way; a fenced block will do.
- `repair`: the visible tests' report is read, the last version counts, and passing them by heart earns nothing.
- A sandbox that fails makes the rollout `infra`; a rollout whose time is up closes its sandbox.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import pytest

from areal_agent import Rollout
from areal_agent.errors import SandboxError
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Status
from envs.code import repair, write
from envs.code.judging import open_sandboxes, reward_of, visible_report
from envs.code.problems.tasks import PROBLEMS, load, load_repairs, task_of
from envs.code.tiny import tasks as tiny
from envs.code.tiny.demonstrations import HABITS, demonstrations, repairs, submits, tries_and_submits
from sandboxes import Sandbox, open_pool
from tests.envs.stage import END, Play, open_stage, renderer_of, told

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


TASK = {
    "messages": [{"role": "user", "content": "Write f(x): 37 * x + 512."}],
    "function": "f",
    "visible": [[[2], 586]],
    "cases": [[[0], 512], [[7], 771]],
}
RIGHT = "def f(x): return 37 * x + 512"
WRONG = "def f(x): return 37 * x - 512"


def call(tool: str, code: str) -> str:
    return f'<tool_call>{{"name": "{tool}", "arguments": {json.dumps({"code": code})}}}</tool_call>{END}'


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return renderer_of(demonstrations(0), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def play(renderer: Renderer) -> AsyncIterator[Play]:
    async with open_stage(renderer, TASK) as play:
        yield play


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        ((call("submit", RIGHT),), 1.0),
        ((call("submit", WRONG),), 0.0),
        ((call("python", f"{RIGHT}\nprint(f(2))"), call("submit", RIGHT)), 1.0),
        ((call("python", RIGHT), f"It works.{END}"), 0.0),
        ((f"So:\n```python\n{RIGHT}\n```\n{END}",), 1.0),
        ((f"I cannot.{END}",), 0.0),
        ((call("submit", "import os; os._exit(0)"),), 0.0),
        ((call("python", "pass"),) * write.MAX_TURNS, 0.0),
    ],
)
async def test_write(play: Play, texts: tuple[str, ...], reward: float) -> None:
    trajectory = await play(write.solve, *texts)
    assert (trajectory.status, trajectory.rewards.final) == (Status.COMPLETED, reward), trajectory.error


async def test_write_reads_what_its_tools_say(play: Play) -> None:
    trajectory = await play(
        write.solve, call("python", f"{RIGHT}\nprint(f(2))"), call("bash", "ls"), call("python", "1/0"), f"No.{END}"
    )
    first, second, third = told(trajectory)
    assert (first, second) == ("586", "Error: there is no tool 'bash'; there are python, submit")
    assert third.endswith("ZeroDivisionError: division by zero\nError: nonzero (exit code 1)")


@pytest.mark.parametrize(
    ("texts", "reward"),
    [
        ((call("run_tests", RIGHT),), 1.0),
        ((call("run_tests", WRONG), call("run_tests", RIGHT)), 1.0),
        ((call("run_tests", WRONG), f"```\n{RIGHT}\n```{END}"), 1.0),
        ((call("run_tests", WRONG), f"It cannot be done.{END}"), 0.0),
        ((call("run_tests", "def f(x): return 586"),), 0.0),
        ((call("run_tests", WRONG),) * repair.MAX_TURNS, 0.0),
    ],
)
async def test_repair(play: Play, texts: tuple[str, ...], reward: float) -> None:
    trajectory = await play(repair.solve, *texts)
    assert (trajectory.status, trajectory.rewards.final) == (Status.COMPLETED, reward), trajectory.error


async def test_repair_reads_the_tests_report(play: Play) -> None:
    trajectory = await play(repair.solve, call("run_tests", WRONG), call("run_tests", RIGHT))
    assert told(trajectory) == ["0 of 1 tests passed.\nf(2) is -438, not 586."]


async def test_a_sandbox_that_fails_is_no_fault_of_the_models(play: Play) -> None:
    async def solve(task: dict[str, Any], rollout: Rollout) -> float:
        pool = await rollout.shared(open_sandboxes)
        await pool.close()
        return await write.solve(task, rollout)

    trajectory = await play(solve, call("submit", RIGHT))
    assert (trajectory.status, trajectory.rewards.is_missing) == (Status.INFRA, True)


async def test_a_rollout_whose_time_is_up_closes_its_sandbox(play: Play) -> None:
    boxes: list[Sandbox] = []

    async def solve(task: dict[str, Any], rollout: Rollout) -> float:
        pool = await rollout.shared(open_sandboxes)
        boxes.append(await rollout.enter(pool.acquire()))
        await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
        await boxes[0].exec(["sleep", "1000"])
        return 1.0

    trajectory = await play(solve, f"Yes.{END}", timeout_s=4.0)
    assert trajectory.status is Status.TIMEOUT
    with pytest.raises(SandboxError, match="closed"):
        await boxes[0].exec(["true"])
