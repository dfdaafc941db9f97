"""The two workflows of the code environment, run as in training; the model is scripted, the sandboxes are real.

1. `write`: a submission is judged by hidden cases, tried programs and their errors are read on the way, a fenced block
will do, nothing handed in earns nothing; 2. `repair`: the visible tests' report is read, the last version counts, and
passing the visible tests by heart earns nothing; 3. a sandbox that fails makes the rollout `infra`; 4. a rollout whose
time is up closes its sandbox.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from areal_agent import Rollout
from areal_agent.errors import SandboxError
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import Status
from envs.code import repair, write
from envs.code.judging import open_sandboxes
from envs.code.tiny.demonstrations import demonstrations
from sandboxes import Sandbox
from tests.envs.stage import END, Play, open_stage, renderer_of, told

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
