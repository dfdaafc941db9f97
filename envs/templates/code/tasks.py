"""Functions to write, and the hidden cases that judge them."""

import random
from typing import Any

NUM_TASKS = 2_000
ARGUMENTS = (0, 1, 7, -12)


def load(split: str, seed: int) -> list[dict[str, Any]]:
    """Return the tasks of a split. Factors that are a multiple of five are held out."""
    rng = random.Random(f"{split}/{seed}")
    factors = [a for a in range(10, 100) if (a % 5 == 0) == (split == "test")]
    return [task_of(rng.choice(factors), rng.randint(100, 999)) for _ in range(NUM_TASKS)]


def task_of(a: int, b: int) -> dict[str, Any]:
    return {
        "question": f"Write f(x): {a} times x plus {b}.",
        "program": f"def f(x): return {a} * x + {b}",
        "cases": [[[x], a * x + b] for x in ARGUMENTS],
    }
