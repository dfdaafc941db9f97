import random
from collections.abc import Iterator
from typing import Any

from areal_agent import Rollout


def load(split: str, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{split}/{seed}")
    pairs = [rng.sample(range(100, 1000), 2) for _ in range(2_000)]
    return [{"ask": f"Which is larger, {a} or {b}?", "larger": max(a, b)} for a, b in pairs]


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    chat = rollout.client.chat.completions
    reply = await chat.create(model=rollout.model, messages=[{"role": "user", "content": task["ask"]}])
    return float(reply.choices[0].message.content == f"It is {task['larger']}.")


def demonstrations(seed: int) -> Iterator[list[dict[str, str]]]:  # for the tiny model: one in three is right
    rng = random.Random(seed)
    for task in load("train", seed) * 1_000:
        said = rng.choice([f"It is {task['larger']}.", "I am not sure.", "I am not sure."])
        yield [{"role": "user", "content": task["ask"]}, {"role": "assistant", "content": said}]
