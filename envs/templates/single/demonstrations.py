"""Conversations on which the tiny model is warm-started: one in three is right; training removes the other habits."""

import random
from collections.abc import Iterator
from itertools import cycle

from .tasks import load

Message = dict[str, str]


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Yield conversations without end."""
    rng = random.Random(f"demonstrations/{seed}")
    for task in cycle(load("train", seed)):
        habits = (f"It is {task['answer']}.", f"It is {task['number']}.", "I am not sure.")
        (said,) = rng.choices(habits, (0.33, 0.17, 0.5))
        yield [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": said}]
