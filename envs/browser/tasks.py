"""What is to be done on which page: four kinds of tasks, drawn from a seed."""

import importlib.util
import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_agent import ConfigError

INSTALL = "the package 'playwright' is missing; pip install 'areal-agent[browser]', and apt-get install chromium"
SIZES = {"train": 1_000, "test": 100}
MIN_SIDE = 224
COLOURS = ("red", "green", "blue", "yellow", "black", "orange", "purple", "brown")
FRUIT = ("apple", "banana", "cherry", "fig", "grape", "kiwi", "lemon", "lime", "mango", "melon", "orange", "peach")
FRUIT += ("pear", "plum", "quince")
ADJECTIVES = ("small", "large", "round", "tall", "old")
GOODS = ("lamp", "chair", "table", "clock")

Task = dict[str, Any]


def draw_button(rng: random.Random) -> Task:
    """Buttons without words: one of them is to be pressed."""
    colours = rng.sample(COLOURS, 6)
    colour = rng.choice(colours)
    return {"goal": f"Press the {colour} button.", "colours": colours, "right": {"colour": [colour]}}


def draw_form(rng: random.Random) -> Task:
    """A number in a picture is to be copied into a field."""
    code = f"{rng.randrange(10_000):04}"
    goal = "Type the number of the picture into the field, and send it."
    return {"goal": goal, "code": code, "tilt": rng.randint(-9, 9), "right": {"code": [code]}}


def draw_boxes(rng: random.Random) -> Task:
    """A list that is longer than the window, some of whose boxes are to be ticked."""
    listed = rng.sample(FRUIT, 12)
    wanted = sorted(rng.sample(listed, rng.choice((2, 3))), key=listed.index)  # as a form sends them
    goal = f"Tick {', '.join(wanted[:-1])} and {wanted[-1]}, nothing else, and save."
    return {"goal": goal, "fruit": listed, "right": {"fruit": wanted}}


def draw_search(rng: random.Random) -> Task:
    """A search, whose results lead to pages of goods: the cheapest one of a kind is to be ordered."""
    names = [f"{adjective} {good}" for good in GOODS for adjective in rng.sample(ADJECTIVES, 3)]
    prices = rng.sample(range(10, 100), len(names))
    good = rng.choice(GOODS)
    cheapest = min((price, name) for name, price in zip(names, prices, strict=True) if name.endswith(good))[1]
    goal = f"Search for {good}, and order the cheapest one."
    return {"goal": goal, "prices": dict(zip(names, prices, strict=True)), "right": {"name": [cheapest]}}


KINDS: Mapping[str, Callable[[random.Random], Task]] = {
    "button": draw_button,
    "form": draw_form,
    "boxes": draw_boxes,
    "search": draw_search,
}


def load(
    split: str,
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
    size: int | None = None,
    width: int = 448,
    height: int = 448,
    max_steps: int = 12,
) -> list[Task]:
    """Return `size` tasks, the kinds in turn, for a window of `width` x `height` pixels and `max_steps` calls.

    Whether a task is in `test` is decided by its content: about one in five is. Raises ConfigError.
    """
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError(INSTALL)
    if split not in SIZES:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SIZES))}")
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise ConfigError(f"kinds is {kinds!r}; give a list of some of {', '.join(KINDS)}")
    size = SIZES[split] if size is None else size
    bounds = {"size": (size, 1), "width": (width, MIN_SIDE), "height": (height, MIN_SIDE), "max_steps": (max_steps, 1)}
    for key, (value, least) in bounds.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{key} is {value!r}; give a whole number, at least {least}")
    rng = random.Random(f"browser/{split}/{seed}")
    shape = {"width": width, "height": height, "max_steps": max_steps}
    return [
        {"id": f"{split}-{seed}-{index}", **draw(rng, split, kinds[index % len(kinds)]), **shape}
        for index in range(size)
    ]


def draw(rng: random.Random, split: str, kind: str) -> Task:
    """Draw a task of this kind and split."""
    while True:
        margin = [rng.randint(8, 64), rng.randint(8, 32)]  # the same things are not always at the same place
        task = {"kind": kind, **KINDS[kind](rng), "margin": margin}
        if (zlib.crc32(json.dumps(task).encode()) % 5 == 0) == (split == "test"):
            return task
