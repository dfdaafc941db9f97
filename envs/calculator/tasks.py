"""The questions of the calculator: `A op B op C`, and which operand values are held out."""

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]

NUM_TASKS: Mapping[Split, int] = {"train": 20_000, "test": 1_000}

HEADS = ("What is {}?", "Compute {}.", "Work out {}.")
WORDS: Mapping[str, str] = {"+": "plus", "-": "minus", "*": "times"}
FORMS = (
    (("*", "+"), False),
    (("*", "-"), False),
    (("+", "*"), False),
    (("-", "*"), False),
    (("+", "*"), True),
    (("-", "*"), True),
)
"""Operators, and whether the first two operands stand in brackets."""
NUM_RESULT_DIGITS = 5
"""One product and a result of five digits: hard to compute in the head, and soon copied by a small model."""

_APPLY: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Three operands and two operators; `is_bracketed` puts brackets around the first two operands.

    >>> question = Question(operands=(348, 27, 191), operators=("+", "*"), is_bracketed=True)
    >>> question.expression, question.answer
    ('(348 + 27) * 191', 71625)
    """

    operands: tuple[int, int, int]
    operators: tuple[str, str]
    is_bracketed: bool = False

    @property
    def expression(self) -> str:
        """The question as Python writes it."""
        return self._written(self.operators)

    @property
    def answer(self) -> int:
        a, b, c = self.operands
        first, second = (_APPLY[name] for name in self.operators)
        product_last = self.operators[1] == "*" and not self.is_bracketed
        return first(a, second(b, c)) if product_last else second(first(a, b), c)

    @property
    def is_fair(self) -> bool:
        """True when the result has the right number of digits."""
        return len(str(abs(self.answer))) == NUM_RESULT_DIGITS

    def text(self, head: str, *, in_words: bool) -> str:
        """Return the question as a person asks it."""
        first, second = self.operators
        return head.format(self._written((WORDS[first], WORDS[second]) if in_words else (first, second)))

    def _written(self, operators: tuple[str, str]) -> str:
        a, b, c = self.operands
        first, second = operators
        pair = f"{a} {first} {b}"
        return f"({pair}) {second} {c}" if self.is_bracketed else f"{pair} {second} {c}"


def is_held_out(operand: int) -> bool:
    """Return whether an operand value belongs to the test split: about one in five, spread over all digits."""
    return operand * 48271 % 1021 < 204


def draw_question(rng: random.Random, split: Split) -> Question:
    """Draw a question whose operands, of three, two and three digits, all belong to `split`."""
    operators, is_bracketed = rng.choice(FORMS)
    while True:
        a, b, c = (_draw_operand(rng, split, low, high) for low, high in ((100, 999), (10, 99), (100, 999)))
        question = Question(operands=(a, b, c), operators=operators, is_bracketed=is_bracketed)
        if question.is_fair:
            return question


def draw_text(rng: random.Random, question: Question) -> str:
    """Return one of the ways to ask a question."""
    return question.text(rng.choice(HEADS), in_words=rng.random() < 0.5)


def load(split: Split, seed: int, num: int | None = None) -> list[dict[str, Any]]:
    """Return `num` tasks of a split. No operand value of the test split occurs in any training task.

    Each has `id`, `messages` (the question, from the user) and `answer` (digits, as text).
    """
    if split not in NUM_TASKS:
        raise ValueError(f"split is {split!r}; valid: {', '.join(map(repr, NUM_TASKS))}")
    if num is not None and num < 1:
        raise ValueError(f"num is {num}; give at least 1, or leave it out for {NUM_TASKS[split]}")
    rng = random.Random(f"calculator/{split}/{seed}")
    return [_draw_task(rng, split, f"{split}-{seed}-{index}") for index in range(num or NUM_TASKS[split])]


def _draw_task(rng: random.Random, split: Split, task_id: str) -> dict[str, Any]:
    question = draw_question(rng, split)
    messages = [{"role": "user", "content": draw_text(rng, question)}]
    return {"id": task_id, "messages": messages, "answer": str(question.answer)}


def _draw_operand(rng: random.Random, split: Split, low: int, high: int) -> int:
    while True:
        operand = rng.randint(low, high)
        if is_held_out(operand) == (split == "test"):
            return operand
