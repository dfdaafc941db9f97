"""Pairs of numbers, the question which of them was said first or last, and the reward of an answer."""

import random
import re

NUM_TASKS = 2_000


def load(split: str, seed: int) -> list[dict[str, str]]:
    """Return the tasks of a split. Pairs whose sum is a multiple of five are held out."""
    rng = random.Random(f"{split}/{seed}")
    tasks: list[dict[str, str]] = []
    while len(tasks) < NUM_TASKS:
        first, last = rng.sample(range(100, 1000), 2)
        if ((first + last) % 5 == 0) == (split == "test"):
            place, answer, other = rng.choice([("first", first, last), ("last", last, first)])
            question = f"{first}, then {last}: which came {place}?"
            tasks.append({"question": question, "answer": str(answer), "other": str(other)})
    return tasks


def score(said: str, answer: str) -> float:
    """Return 1.0 when the last number of what was said is the answer, else 0.0.

    >>> score("It is 371.", "371"), score("371 or 264", "371"), score("I am not sure.", "371")
    (1.0, 0.0, 0.0)
    """
    numbers: list[str] = re.findall(r"\d+", said)
    return float(numbers[-1:] == [answer])
