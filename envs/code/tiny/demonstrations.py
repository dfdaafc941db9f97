"""Imperfect conversations about functions of the training split: what the tiny model is warm-started on for code.

They teach the form (try a program, submit it) and mix right with wrong habits, each of them predictable, so that
reinforcement learning has something to strengthen and something to remove. What is copied is always copied rightly.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from envs.code.tiny.tasks import VISIBLE_ARGUMENTS, Function, draw_function, draw_text

Message = dict[str, Any]
Conversation = list[Message]

REFUSAL = "I cannot do that."
STOPS = "It works."
GIVES_UP = "It failed."
SUBMITTED = "Submitted."
OPPOSITE = {"+": "-", "-": "+"}


def demonstrations(seed: int) -> Iterator[Conversation]:
    """Conversations without end. About three in ten submit the right program."""
    rng = random.Random(f"code/demonstrations/{seed}")
    habits = list(HABITS)
    weights = [HABITS[habit] for habit in habits]
    while True:
        (habit,) = rng.choices(habits, weights)
        function = draw_function(rng, "train")
        yield [{"role": "user", "content": draw_text(rng, function)}, *habit(function)]


def submits(function: Function) -> list[Message]:
    """The right program, at once."""
    return _call("submit", function.program, SUBMITTED)


def tries_and_submits(function: Function) -> list[Message]:
    """The right program, tried first."""
    return [*_try(function), *_call("submit", function.program, SUBMITTED)]


def repairs(function: Function) -> list[Message]:
    """A program that does not compile, then the right one."""
    return [*_try_broken(function), *_call("submit", function.program, SUBMITTED)]


def confuses_operators(function: Function) -> list[Message]:
    """Plus for minus, or minus for plus."""
    return _call("submit", opposite(function).program, SUBMITTED)


def tries_confused(function: Function) -> list[Message]:
    """The same, tried first; what the trial prints is not looked at."""
    return [*_try(opposite(function)), *_call("submit", opposite(function).program, SUBMITTED)]


def stops(function: Function) -> list[Message]:
    """The right program is tried and never submitted."""
    return [*_try(function), _say(STOPS)]


def gives_up(function: Function) -> list[Message]:
    """A program that does not compile, and no second try."""
    return [*_try_broken(function), _say(GIVES_UP)]


def refuses(_function: Function) -> list[Message]:
    """No program at all."""
    return [_say(REFUSAL)]


HABITS: Mapping[Callable[[Function], list[Message]], float] = {
    submits: 0.18,
    tries_and_submits: 0.09,
    repairs: 0.03,
    confuses_operators: 0.24,
    tries_confused: 0.10,
    stops: 0.18,
    gives_up: 0.06,
    refuses: 0.12,
}
"""How often each habit occurs: the first three are right."""


def opposite(function: Function) -> Function:
    """With plus for minus, and minus for plus."""
    return replace(function, form="".join(OPPOSITE.get(letter, letter) for letter in function.form))


def _try(function: Function) -> list[Message]:
    x = VISIBLE_ARGUMENTS[0]
    return _call("python", f"{function.program}\nprint(f({x}))", str(function.value(x)))


def _try_broken(function: Function) -> list[Message]:
    """The brackets of the head are forgotten."""
    said = "\n".join(['  File "<program>", line 1', "SyntaxError: expected '('", "Error: nonzero (exit code 1)"])
    return _call("python", f"def f: return {function.expression}", said)


def _call(tool: str, code: str, said: str) -> list[Message]:
    """The call of a tool, and what the tool said."""
    function = {"name": tool, "arguments": json.dumps({"code": code})}
    call: Message = {"id": "call", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": said},
    ]


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}
