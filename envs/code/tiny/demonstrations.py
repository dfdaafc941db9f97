"""Imperfect conversations about functions of the training split, on which the tiny model is warm-started for code.

They teach the form (try a program, submit it) and mix right with wrong habits, each of them predictable, so that
reinforcement learning has something to strengthen and something to remove. Copies are always exact.
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
    """Yield conversations without end. About three in ten submit the right program."""
    rng = random.Random(f"code/demonstrations/{seed}")
    habits = list(HABITS)
    weights = [HABITS[habit] for habit in habits]
    while True:
        (habit,) = rng.choices(habits, weights)
        function = draw_function(rng, "train")
        yield [{"role": "user", "content": draw_text(rng, function)}, *habit(function)]


def submits(function: Function) -> list[Message]:
    """Submit the right program at once."""
    return _call("submit", function.program, SUBMITTED)


def tries_and_submits(function: Function) -> list[Message]:
    """Try the right program, then submit it."""
    return [*_try(function), *_call("submit", function.program, SUBMITTED)]


def repairs(function: Function) -> list[Message]:
    """Try a program that does not compile, then submit the right one."""
    return [*_try_broken(function), *_call("submit", function.program, SUBMITTED)]


def confuses_operators(function: Function) -> list[Message]:
    """Submit a program with plus for minus, or minus for plus."""
    return _call("submit", opposite(function).program, SUBMITTED)


def tries_confused(function: Function) -> list[Message]:
    """Try a program with plus and minus exchanged, and submit it without looking at what it printed."""
    return [*_try(opposite(function)), *_call("submit", opposite(function).program, SUBMITTED)]


def stops(function: Function) -> list[Message]:
    """Try the right program and never submit it."""
    return [*_try(function), _say(STOPS)]


def gives_up(function: Function) -> list[Message]:
    """Try a program that does not compile, and stop."""
    return [*_try_broken(function), _say(GIVES_UP)]


def refuses(_function: Function) -> list[Message]:
    """Write no program at all."""
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
"""The frequency of each habit; the first three are right."""


def opposite(function: Function) -> Function:
    """Return the function with plus and minus exchanged."""
    return replace(function, form="".join(OPPOSITE.get(letter, letter) for letter in function.form))


def _try(function: Function) -> list[Message]:
    x = VISIBLE_ARGUMENTS[0]
    return _call("python", f"{function.program}\nprint(f({x}))", str(function.value(x)))


def _try_broken(function: Function) -> list[Message]:
    """Try a program whose head lacks its brackets."""
    said = "\n".join(['  File "<program>", line 1', "SyntaxError: expected '('", "Error: nonzero (exit code 1)"])
    return _call("python", f"def f: return {function.expression}", said)


def _call(tool: str, code: str, said: str) -> list[Message]:
    """Return a tool call and the tool's answer."""
    function = {"name": tool, "arguments": json.dumps({"code": code})}
    call: Message = {"id": "call", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": said},
    ]


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}
