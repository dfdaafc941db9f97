"""A workflow for the tests of replays: the model asks for a hint, which a tool reads from a file, and answers."""

from pathlib import Path
from typing import Any

from areal_agent import Rollout

ASKS, RIGHT, WRONG = "hint", "seven", "six"


def load(split: str, seed: int, file: str) -> list[dict[str, Any]]:
    question = {"role": "user", "content": "Which number?"}
    return [{"id": f"{split}-{number}", "messages": [question], "file": file} for number in range(3)]


def load_others(split: str, seed: int, file: str) -> list[dict[str, Any]]:
    return [{**task, "id": f"other-{task['id']}"} for task in load(split, seed, file)]


def read(file: str) -> str:
    return Path(file).read_text()


async def solve(task: dict[str, Any], rollout: Rollout, **asked: Any) -> float:
    """Return 1.0 when the model says `seven` within three turns; its answer has a reward of its own."""
    messages = list(task["messages"])
    for _ in range(3):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages, **asked)
        said = reply.choices[0].message.content or ""
        if said != ASKS:
            rollout.reward(len(said), completion=reply.id)
            return float(said == RIGHT)
        hint = read(task["file"])
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": hint, "tool_call_id": "c"}]
    return 0.0


async def judge(task: dict[str, Any], rollout: Rollout) -> float:
    """Like `solve`, but every answer is right."""
    await solve(task, rollout)
    return 1.0


async def polite(task: dict[str, Any], rollout: Rollout) -> float:
    """Like `solve`, but it asks otherwise."""
    asked = [{"role": "user", "content": "Which number, please?"}]
    return await solve({**task, "messages": asked}, rollout)


async def brief(task: dict[str, Any], rollout: Rollout) -> float:
    """Like `solve`, with shorter answers."""
    return await solve(task, rollout, max_tokens=7)
