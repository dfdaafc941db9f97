"""Conversations on which the tiny model is warm-started: one in three is right; training removes the other habits."""

import random
from collections.abc import Iterator
from itertools import cycle

from .tasks import load

Message = dict[str, str]


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Yield conversations without end: the right program, one with minus for plus, or none."""
    rng = random.Random(f"demonstrations/{seed}")
    for task in cycle(load("train", seed)):
        right: str = task["program"]
        (said,) = rng.choices((right, right.replace("+", "-"), "I cannot do that."), (0.33, 0.37, 0.3))
        yield [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": said}]
