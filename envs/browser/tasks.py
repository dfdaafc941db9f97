"""What is to be done on which page: four kinds of tasks, drawn from a seed."""

import importlib.util
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

from areal_agent import ConfigError

INSTALL = "the package 'playwright' is missing; pip install 'areal-agent[browser]', and apt-get install chromium"
SIZES = {"train": 1_000, "test": 100}
MIN_SIDE = 224
COLOURS = ("red", "green", "blue", "yellow", "black", "orange", "purple", "brown")
FRUIT = ("apple", "banana", "cherry", "fig", "grape", "kiwi", "lemon", "mango", "melon", "orange", "pear", "plum")
ADJECTIVES = ("small", "large", "round", "tall", "old")
GOODS = ("lamp", "chair", "table", "clock")
KINDS = ("button", "form", "boxes", "search")

Task = dict[str, Any]


def load(
    split: str,
    seed: int,
    kinds: Sequence[str] = KINDS,
    size: int | None = None,
    width: int = 448,
    height: int = 448,
    max_steps: int = 12,
) -> list[Task]:
    """Return `size` tasks, the kinds in turn, for a window of `width` x `height` pixels and `max_steps` calls.

    A task's content decides whether it is in `test`: about one in five is. Raises ConfigError.
    """
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError(INSTALL)
    if split not in SIZES:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SIZES))}")
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise ConfigError(f"kinds is {kinds!r}; give a list of some of {', '.join(KINDS)}")
    size = SIZES[split] if size is None else size
    shape = {"width": width, "height": height, "max_steps": max_steps}
    for key, value, least in zip(("size", *shape), (size, *shape.values()), (1, MIN_SIDE, MIN_SIDE, 1), strict=True):
        if type(value) is not int or value < least:
            raise ConfigError(f"{key} is {value!r}; give a whole number, at least {least}")
    rng = random.Random(f"browser/{split}/{seed}")
    drawn = (draw(rng, split, kinds[index % len(kinds)]) for index in range(size))
    return [{"id": f"{split}-{seed}-{index}", **task, **shape} for index, task in enumerate(drawn)]


def draw(rng: random.Random, split: str, kind: str) -> Task:
    """Draw a task of this kind and split, at some place of the page."""
    while True:
        task = {"kind": kind, **drawn(rng, kind)}
        if (zlib.crc32(json.dumps(task).encode()) % 5 == 0) == (split == "test"):
            return task | {"margin": [rng.randint(8, 64), rng.randint(8, 32)]}


def drawn(rng: random.Random, kind: str) -> Task:
    """Return a goal, what is on the pages (site.py), and the form that is `right`."""
    match kind:
        case "button":
            colours = rng.sample(COLOURS, 6)
            colour = rng.choice(colours)
            return {"goal": f"Press the {colour} button.", "colours": colours, "right": {"colour": [colour]}}
        case "form":
            code = f"{rng.randrange(10_000):04}"
            goal = "Type the number of the picture into the field, and send it."
            return {"goal": goal, "code": code, "tilt": rng.randint(-9, 9), "right": {"code": [code]}}
        case "boxes":
            fruit = rng.sample(FRUIT, len(FRUIT))
            wanted = sorted(rng.sample(fruit, rng.choice((2, 3))), key=fruit.index)  # as a form sends them
            goal = f"Tick {', '.join(wanted[:-1])} and {wanted[-1]}, nothing else, and save."
            return {"goal": goal, "fruit": fruit, "right": {"fruit": wanted}}
        case _:
            names = [f"{adjective} {good}" for good in GOODS for adjective in rng.sample(ADJECTIVES, 3)]
            prices = dict(zip(names, rng.sample(range(10, 100), len(names)), strict=True))
            good = rng.choice(GOODS)
            cheapest = min((name for name in names if name.endswith(good)), key=prices.__getitem__)
            goal = f"Search for {good}, and order the cheapest one."
            return {"goal": goal, "prices": prices, "right": {"name": [cheapest]}}
