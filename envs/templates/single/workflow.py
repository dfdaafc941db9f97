"""One question, one answer: the model is asked once, and its answer is the reward."""

from typing import Any

from areal_agent import Rollout

from .tasks import score


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    reply = await rollout.client.chat.completions.create(
        model=rollout.model, messages=[{"role": "user", "content": task["question"]}]
    )
    return score(reply.choices[0].message.content or "", task["answer"])
