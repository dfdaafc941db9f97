"""Numbers to be said backwards, and the reward of an answer."""

import random
import re

NUM_TASKS = 2_000


def load(split: str, seed: int) -> list[dict[str, str]]:
    """Return the tasks of a split. Numbers whose digits have a sum that is a multiple of five are held out."""
    rng = random.Random(f"{split}/{seed}")
    numbers = [str(number) for number in range(1_000, 10_000)]
    of_split = [one for one in numbers if (sum(map(int, one)) % 5 == 0) == (split == "test")]
    chosen = rng.choices(of_split, k=NUM_TASKS)
    return [{"question": f"Say {one} backwards.", "number": one, "answer": one[::-1]} for one in chosen]


def score(said: str, answer: str) -> float:
    """Return 1.0 when the last number of what was said is the answer, else 0.0.

    >>> score("It is 173.", "173"), score("173 or 371", "173"), score("I am not sure.", "173")
    (1.0, 0.0, 0.0)
    """
    numbers: list[str] = re.findall(r"\d+", said)
    return float(numbers[-1:] == [answer])
