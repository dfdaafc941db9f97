"""Run commands in a task's sandbox with the `bash` tool; the task is over when the model calls no more tools.

Ordinary agent code over a stock `openai` client.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.code.conversation import take_turn
from sandboxes import Pool, open_pool
from sandboxes.tasks.harbor import HarborTask
from sandboxes.tools import BASH, Toolbox

SANDBOX_BACKENDS = ("docker",)
"""A task is a folder with an image; a run with another sandbox is refused before it starts."""
MAX_TURNS = 6


class Bench:
    """The things that all rollouts of a run share: the pool, and the tasks with their images."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.task_in = cache(HarborTask.load)


@asynccontextmanager
async def open_bench(rollout: Rollout) -> AsyncGenerator[Bench, None]:
    async with open_pool(**rollout.sandbox) as pool:
        yield Bench(pool)


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return the reward that the task's tests give to what the model left in its sandbox."""
    bench = await rollout.shared(open_bench)
    harbor = bench.task_in(task["folder"])
    await harbor.prepare()
    box = await rollout.enter(harbor.open(bench.pool))

    async def open_box():
        return box

    toolbox = Toolbox(open_box, [BASH])
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    for _ in range(MAX_TURNS):
        message = await take_turn(rollout, messages, toolbox)
        if not message.tool_calls:
            break
    verdict = await harbor.verify(box, bench.pool)
    rollout.log(**verdict.logged)
    return verdict.reward_for(bench.pool.on_suspicion)
