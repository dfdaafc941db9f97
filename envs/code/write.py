"""Write a function: the model may try programs with the `python` tool, and submits one, which hidden cases judge.

A model without tools may answer with a fenced block instead.
"""

from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.code.conversation import fenced_code, take_turn
from envs.code.judging import open_sandboxes, reward_of
from sandboxes.tools import PYTHON, SUBMIT, Toolbox

MAX_TURNS = 6


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the submitted program passes every hidden case, else 0.0."""
    pool = await rollout.shared(open_sandboxes)
    toolbox = Toolbox(lambda: rollout.enter(pool.acquire()), [PYTHON, SUBMIT])
    messages: list[ChatCompletionMessageParam] = list(task["messages"])
    for _ in range(MAX_TURNS):
        message = await take_turn(rollout, messages, toolbox)
        if toolbox.submitted is not None:
            return await reward_of(toolbox.submitted, task, pool)
        if not message.tool_calls:
            return await reward_of(fenced_code(message.content), task, pool)
    return 0.0
