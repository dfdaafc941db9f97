"""Generated problems with answers in LaTeX: enough to see that everything works. Real sets are named in a config."""

import random
from collections.abc import Callable
from fractions import Fraction
from math import comb, lcm

NUM_TASKS = {"train": 2_000, "test": 200}


def load(split: str, seed: int) -> list[dict[str, str]]:
    """Return the tasks of a split, with `problem` and `answer`. No problem of the split `test` is in `train`."""
    if split not in NUM_TASKS:
        raise ValueError(f"split is {split!r}; valid: {', '.join(map(repr, NUM_TASKS))}")
    rng = random.Random(f"math/{split}/{seed}")
    tasks: list[dict[str, str]] = []
    while len(tasks) < NUM_TASKS[split]:
        a, b = rng.sample(range(2, 60), 2)
        if ((a + b) % 5 == 0) == (split == "test"):
            problem, answer = rng.choice(KINDS)(a, b)
            tasks.append({"problem": problem, "answer": answer})
    return tasks


def linear(a: int, b: int) -> tuple[str, str]:
    """
    >>> linear(4, 6)
    ('Solve $4x + 6 = 0$ for $x$.', '-\\\\frac{3}{2}')
    """
    x = Fraction(-b, a)
    answer = str(x) if x.denominator == 1 else f"-\\frac{{{-x.numerator}}}{{{x.denominator}}}"
    return f"Solve ${a}x + {b} = 0$ for $x$.", answer


def roots(a: int, b: int) -> tuple[str, str]:
    return f"Find all real $x$ with $x^2 - {a + b}x + {a * b} = 0$.", f"\\{{{a}, {b}\\}}"


def multiple(a: int, b: int) -> tuple[str, str]:
    return f"What is the least common multiple of {a} and {b}?", str(lcm(a, b))


def subsets(a: int, b: int) -> tuple[str, str]:
    n, k = a + b, min(a, b, 4)
    return f"How many subsets with {k} elements does a set with {n} elements have?", str(comb(n, k))


def expansion(a: int, b: int) -> tuple[str, str]:
    return f"Expand $(x + {a})(x - {b})$.", f"x^2 + {a - b}x - {a * b}" if a > b else f"x^2 - {b - a}x - {a * b}"


KINDS: tuple[Callable[[int, int], tuple[str, str]], ...] = (linear, roots, multiple, subsets, expansion)
