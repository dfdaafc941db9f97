"""Conversations on which the tiny model is warm-started: three in ten are right; training removes the other habits."""

import json
import random
from collections.abc import Iterator
from itertools import cycle
from typing import Any

from .tasks import load, stock_of

Message = dict[str, Any]


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """Yield conversations without end: looked up and told, looked up and not told, or not looked up."""
    rng = random.Random(f"demonstrations/{seed}")
    for task in cycle(load("train", seed)):
        question: Message = {"role": "user", "content": task["question"]}
        count = stock_of(task["item"])
        looked_up = [question, *look_up(task["item"], count)]
        habits = (
            [*looked_up, say(f"There are {count}.")],
            [*looked_up, say("There are some.")],
            [question, say("None.")],
        )
        (conversation,) = rng.choices(habits, (0.3, 0.4, 0.3))
        yield conversation


def look_up(item: str, count: str) -> list[Message]:
    """Return a tool call and the tool's answer."""
    function = {"name": "stock", "arguments": json.dumps({"item": item})}
    call: Message = {"id": "call", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call", "content": count},
    ]


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}
