"""One answer to a mathematical problem, without tools, compared by math-verify."""

from typing import Any

from areal_agent import Rollout
from envs.math.judge import final_answer
from envs.math.workflow import open_run_judge

HOW = r"Reason step by step, and put the final answer in \boxed{}."


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    """Return 1.0 when the final answer is right, else 0.0."""
    judge = await rollout.shared(open_run_judge)
    reply = await rollout.client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": f"{task['problem']}\n\n{HOW}"}]
    )
    said = reply.choices[0].message.content or ""
    rollout.log(answer=final_answer(said))
    return float(await judge.is_right(said, str(task["answer"])))
