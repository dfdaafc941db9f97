"""One conversation: the model reasons, may run programs with the `python` tool, and gives a final answer."""

from contextlib import AbstractAsyncContextManager
from typing import Any

from openai.types.chat import ChatCompletionMessageParam

from areal_agent import Rollout
from envs.code.conversation import take_turn
from envs.code.judging import open_sandboxes
from envs.math.judge import Judge, final_answer, open_judge, require_math_verify
from sandboxes.tools import PYTHON, Toolbox

require_math_verify()  # now, so that a dry run finds it missing

MAX_TURNS = 6
HOW = r"Put the final answer in \boxed{}. You may run programs with the tool."


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the final answer is right, else 0.0."""
    judge = await rollout.shared(open_run_judge)
    pool = await rollout.shared(open_sandboxes)
    toolbox = Toolbox(lambda: rollout.enter(pool.acquire()), [PYTHON])
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"{task['problem']}\n\n{HOW}"}]
    for _ in range(MAX_TURNS):
        message = await take_turn(rollout, messages, toolbox)
        if not message.tool_calls:
            rollout.log(answer=final_answer(message.content or ""))
            return float(await judge.is_right(message.content or "", str(task["answer"])))
    return 0.0


def open_run_judge(_rollout: Rollout) -> AbstractAsyncContextManager[Judge]:
    """Open the judge that all rollouts of a run share."""
    return open_judge()
