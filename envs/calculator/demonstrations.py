"""Imperfect conversations about questions of the training split, on which the tiny model is warm-started.

They teach the form (call the tool, copy its output) and mix right with wrong habits, so that reinforcement learning has
something to strengthen and something to remove. Every wrong habit is *predictable*: a model that learnt from random
mistakes would make random mistakes, and have no habits to choose from. Copies are always exact.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from envs.calculator.tasks import Question, draw_question, draw_text

Message = dict[str, Any]
Conversation = list[Message]

ANSWER = "The answer is {}."
VAGUE = "It worked."
REFUSAL = "I cannot do that."
GIVE_UP = "It failed."

OPPOSITE = {"+": "-", "-": "+", "*": "*"}


def demonstrations(seed: int) -> Iterator[Conversation]:
    """Yield conversations without end. About three in ten end with the right answer."""
    rng = random.Random(f"demonstrations/{seed}")
    habits = list(HABITS)
    weights = [HABITS[habit] for habit in habits]
    while True:
        (habit,) = rng.choices(habits, weights)
        yield habit(rng)


def answers(rng: random.Random) -> Conversation:
    """Run the right program, then state its result."""
    question = draw_question(rng, "train")
    return [_ask(question, rng), *_run(question.expression), _say(ANSWER.format(question.answer))]


def stays_vague(rng: random.Random) -> Conversation:
    """Run the right program, but do not state its result."""
    question = draw_question(rng, "train")
    return [_ask(question, rng), *_run(question.expression), _say(VAGUE)]


def refuses(rng: random.Random) -> Conversation:
    """Write no program at all."""
    return [_ask(draw_question(rng, "train"), rng), _say(REFUSAL)]


def confuses_operators(rng: random.Random) -> Conversation:
    """Run a program with plus for minus, or minus for plus, and state its wrong result."""
    question = draw_question(rng, "train")
    confused = _with_opposite_operators(question)
    while not confused.is_fair:  # a result of another length would teach to copy badly
        question = draw_question(rng, "train")
        confused = _with_opposite_operators(question)
    return [_ask(question, rng), *_run(confused.expression), _say(ANSWER.format(confused.answer))]


def gives_up(rng: random.Random) -> Conversation:
    """Run a program that does not compile, and stop."""
    question = draw_question(rng, "train")
    return [_ask(question, rng), *_run(question.expression, end=""), _say(GIVE_UP)]


def repairs(rng: random.Random) -> Conversation:
    """Run a program that does not compile, then the right one, and state its result."""
    question = draw_question(rng, "train")
    tries = [*_run(question.expression, end=""), *_run(question.expression)]
    return [_ask(question, rng), *tries, _say(ANSWER.format(question.answer))]


HABITS: Mapping[Callable[[random.Random], Conversation], float] = {
    answers: 0.28,
    repairs: 0.04,
    stays_vague: 0.32,
    refuses: 0.12,
    confuses_operators: 0.18,
    gives_up: 0.06,
}
"""The frequency of each habit; the first two are right."""


def _with_opposite_operators(question: Question) -> Question:
    first, second = question.operators
    return replace(question, operators=(OPPOSITE[first], OPPOSITE[second]))


def _ask(question: Question, rng: random.Random) -> Message:
    return {"role": "user", "content": draw_text(rng, question)}


def _run(expression: str, end: str = ")") -> list[Message]:
    """Return a tool call and the tool's answer."""
    code = f"print({expression}{end}"
    function = {"name": "python", "arguments": json.dumps({"code": code})}
    call: Message = {"id": "call", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": _output(code, expression)},
    ]


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _output(code: str, expression: str) -> str:
    """Return the output of running `code`, a print of `expression`: the result, or the last line of the traceback."""
    try:
        compile(code, "<program>", "exec")
    except SyntaxError as error:
        return f"SyntaxError: {error.msg}"
    return str(eval(expression, {"__builtins__": {}}))  # an expression of our own making: digits and operators
