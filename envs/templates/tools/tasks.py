"""Questions about a warehouse, whose answers only its tool knows, and the reward of an answer."""

import random
import re

NUM_TASKS = 2_000


def load(split: str, seed: int) -> list[dict[str, str]]:
    """Return the tasks of a split. Items whose number is a multiple of five are held out."""
    rng = random.Random(f"{split}/{seed}")
    numbers = [number for number in range(1000, 10_000) if (number % 5 == 0) == (split == "test")]
    return [
        {"question": f"How many of item {item} are there?", "item": str(item)}
        for item in rng.choices(numbers, k=NUM_TASKS)
    ]


def stock_of(item: str) -> str:
    """Return how many there are of an item, or what is wrong with its number.

    >>> stock_of("1234"), stock_of("pens")
    ('8046', 'Error: no such item')
    """
    is_item = item.isascii() and item.isdigit() and len(item) == 4
    return str(1000 + int(item) * 7919 % 9000) if is_item else "Error: no such item"


def score(said: str, item: str) -> float:
    """Return 1.0 when the last number of an answer is the item's stock, else 0.0.

    >>> score("There are 8046.", "1234"), score("There are some.", "1234")
    (1.0, 0.0)
    """
    numbers: list[str] = re.findall(r"\d+", said)
    return float(numbers[-1:] == [stock_of(item)])
