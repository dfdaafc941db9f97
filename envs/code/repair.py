"""Repair a program over several turns: the model passes versions to `run_tests`, which reports on the visible tests.

Hidden cases judge the last version. The task ends when the visible tests pass, or the model stops calling tools.
"""

from collections.abc import Mapping
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.code.conversation import fenced_code, take_turn
from envs.code.judging import open_sandboxes, reward_of, visible_report
from sandboxes import Pool
from sandboxes.tools import Tool, Toolbox

MAX_TURNS = 6


class Workbench:
    """The versions of one program, and the tool that takes them."""

    def __init__(self, task: Mapping[str, Any], pool: Pool) -> None:
        self._task = task
        self._pool = pool
        self.program: str | None = None  # the last version
        self.is_done = False  # the visible tests pass
        self.tool = Tool(
            name="run_tests",
            description="Run the tests on a version of the program; the last version is the one that counts.",
            parameters={"code": "The whole program."},
            act=self._run_tests,
        )

    async def _run_tests(self, _toolbox: Toolbox, values: Mapping[str, str]) -> str:
        self.program = values["code"]
        self.is_done, report = await visible_report(self.program, self._task, self._pool)
        return report


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the last version passes every hidden case, else 0.0."""
    pool = await rollout.shared(open_sandboxes)
    bench = Workbench(task, pool)
    toolbox = Toolbox(lambda: rollout.enter(pool.acquire()), [bench.tool])
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    for _ in range(MAX_TURNS):
        message = await take_turn(rollout, messages, toolbox)
        if not message.tool_calls:
            bench.program = fenced_code(message.content) or bench.program
        if bench.is_done or not message.tool_calls:
            break
    return await reward_of(bench.program, task, pool)
