"""Pairs of numbers, the question which of them is larger, and the reward of an answer."""

import random
import re

NUM_TASKS = 2_000


def load(split: str, seed: int) -> list[dict[str, str]]:
    """Return the tasks of a split. Pairs whose sum is a multiple of five are held out."""
    rng = random.Random(f"{split}/{seed}")
    tasks: list[dict[str, str]] = []
    while len(tasks) < NUM_TASKS:
        a, b = rng.sample(range(100, 1000), 2)
        if ((a + b) % 5 == 0) == (split == "test"):
            tasks.append(
                {"question": f"Which is larger, {a} or {b}?", "larger": str(max(a, b)), "smaller": str(min(a, b))}
            )
    return tasks


def score(said: str, larger: str) -> float:
    """Return 1.0 when the last number of an answer is the larger one, else 0.0.

    >>> score("It is 371.", "371"), score("371 or 264", "371"), score("I am not sure.", "371")
    (1.0, 0.0, 0.0)
    """
    numbers: list[str] = re.findall(r"\d+", said)
    return float(numbers[-1:] == [larger])
