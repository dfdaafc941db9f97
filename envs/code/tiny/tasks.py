"""Functions of one line for a tiny model: `f(x)` of two numbers, and which numbers are held out."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]

NUM_TASKS: Mapping[Split, int] = {"train": 20_000, "test": 1_000}
HEADS = ("Write f(x): {}.", "f(x) is {}.", "Program f(x), which is {}.")
WORDS: Mapping[str, str] = {"+": "plus", "-": "minus", "*": "times"}
FORMS = ("{a} * x + {b}", "{a} * x - {b}", "{b} - {a} * x", "{b} + {a} * x")
HIDDEN_ARGUMENTS = (0, 1, 7, -12)
VISIBLE_ARGUMENTS = (2, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A function of `x`: `form` with its two numbers.

    >>> function = Function(form="{a} * x - {b}", a=37, b=512)
    >>> function.program, function.value(10)
    ('def f(x): return 37 * x - 512', -142)
    """

    form: str
    a: int
    b: int

    @property
    def expression(self) -> str:
        return self.form.format(a=self.a, b=self.b)

    @property
    def program(self) -> str:
        return f"def f(x): return {self.expression}"

    def value(self, x: int) -> int:
        return eval(self.expression, {"__builtins__": {}}, {"x": x})  # an expression of our own making

    def text(self, head: str, *, in_words: bool) -> str:
        """Return the function as a person asks for it."""
        words = self.expression
        for sign, word in WORDS.items() if in_words else ():
            words = words.replace(sign, word)
        return head.format(words)


def is_held_out(number: int) -> bool:
    """Return whether a number belongs to the test split: about one in five, spread over all digits."""
    return number * 48271 % 1021 < 204


def draw_function(rng: random.Random, split: Split) -> Function:
    """Draw a function whose numbers, of two and of three digits, both belong to `split`."""
    a, b = (_draw_number(rng, split, low, high) for low, high in ((10, 99), (100, 999)))
    return Function(form=rng.choice(FORMS), a=a, b=b)


def draw_text(rng: random.Random, function: Function) -> str:
    """Return one of the ways to ask for it."""
    return function.text(rng.choice(HEADS), in_words=rng.random() < 0.5)


def load(split: Split, seed: int, num: int | None = None) -> list[dict[str, Any]]:
    """Return `num` tasks of a split. No number of a test task occurs in any training task."""
    if split not in NUM_TASKS:
        raise ValueError(f"split is {split!r}; valid: {', '.join(map(repr, NUM_TASKS))}")
    if num is not None and num < 1:
        raise ValueError(f"num is {num}; give at least 1, or leave it out for {NUM_TASKS[split]}")
    rng = random.Random(f"code/{split}/{seed}")
    return [_draw_task(rng, split, f"{split}-{seed}-{index}") for index in range(num or NUM_TASKS[split])]


def _draw_task(rng: random.Random, split: Split, task_id: str) -> dict[str, Any]:
    function = draw_function(rng, split)
    return {
        "id": task_id,
        "messages": [{"role": "user", "content": draw_text(rng, function)}],
        "function": "f",
        "visible": [[[x], function.value(x)] for x in VISIBLE_ARGUMENTS],
        "cases": [[[x], function.value(x)] for x in HIDDEN_ARGUMENTS],
    }


def _draw_number(rng: random.Random, split: Split, low: int, high: int) -> int:
    while True:
        number = rng.randint(low, high)
        if is_held_out(number) == (split == "test"):
            return number
