"""One question and one answer, and how that is scored. TRL's Python imports this file too."""

import re
from typing import Any


def score(text: str, answer: str) -> float:
    """Return 1.0 when the last number of a text is the answer, else 0.0."""
    return float(re.findall(r"-?\d+", text)[-1:] == [answer])


async def solve(task: dict[str, Any], rollout: Any) -> float:
    reply = await rollout.client.chat.completions.create(model=rollout.model, messages=task["messages"])
    return score(reply.choices[0].message.content or "", task["answer"])
