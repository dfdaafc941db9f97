"""The conversations that are played: one for each shape, and random ones. A line writes one, a word for each step.

| word | |
|---|---|
| `S D U A R` | a message: the system's, developer's, user's, assistant's, or the result of a call |
| `A12 R1` | an answer with calls 1 and 2, and the result of call 1; an odd call is of the first tool |
| `B2 F G T1` | the agent goes back by two messages, leaves out thinking, asks again, offers one tool |

| letter | |
|---|---|
| those of `TEXTS` | another content; `t`: text beside calls |
| `h` | thinking |
| `m` | the model's own answer; the following ones are habits of it |
| `b` | its call is forced, or its text was begun by the request |
| `p` `i` `x` `o` | white space around it, narrow JSON, it is cut off, it ends with the other end token |
| `d` `s` | two are sampled, the second is sent back |
| `n` | its calls come back with new ids |
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_agent.tokens.canonical import parse_json_object
from areal_agent.types import JsonObject

ROLES = {"S": "system", "D": "developer", "U": "user", "A": "assistant", "R": "tool"}
TEXTS = {
    "": "Say MARK now.",
    "l": "MARK\n\n* é 你好",
    "w": " MARK \n",
    "e": "",
    "c": "Say MARK CONTROL now.",
    "r": "<tool_response>\nMARK\n</tool_response>",
    "k": "MARK <think>\nno\n</think>\n\nMARK",
}
"""MARK is a word that occurs nowhere else, so that it is seen when it gets lost; CONTROL: the control texts."""

NAMES = ("fetch_it", "look_up")
_TYPES = {"Tool2x": "string", "rate": "number", "flag": "boolean", "deep": "object", "list": "array", "none": ["null"]}


def _tool(name: str, **more: Any) -> JsonObject:
    types = {name: {"type": type_, "description": f"A {name}."} for name, type_ in _TYPES.items()}
    parameters = {"type": "object", "properties": types, "required": ["Tool2x"]}
    function = {"name": name, "description": f"Says Tool1x to {name}.", "parameters": parameters, **more}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not ...}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """A conversation, with the tools that it offers, and more variables for the template."""

    name: str
    line: str
    arguments: str = '{"Tool2x": "MARK"}'
    tools: Sequence[JsonObject] = tuple(map(_tool, reversed(NAMES)))
    options: JsonObject = field(default_factory=dict[str, Any])

    def variants(self, *, can_think: bool = True) -> Iterator["Play"]:
        """Yield the play as it is, and with every answer sampled that a model can write: without and with thinking."""
        yield self
        can_call = "T0" not in self.line and parse_json_object(self.arguments) is not None
        for name, letters in list({"sampled": "m", "sampled, with thinking": "mh"}.items())[: 1 + can_think]:
            line = re.sub(r"A(?!\w*m)" if can_call else r"A(?!\w*[m\d])", f"A{letters}", self.line)
            if line != self.line:
                yield replace(self, name=f"{self.name}, {name}", line=line)


_CALLED = "U A1 R1 U"
_VALUES = r"""{"Tool2x": "MARK \"é\"\nnext", "rate": 2.5, "flag": true, "list": ["5", "true"], "none": null,
"deep": {"k": [1, 2.5, {"z": null}], "on": false, "word": "MARK"}}"""
_LINES = {
    "system": "T0 S U A U",
    "system, developer": "T0 S D U A U",
    "system after user": "T0 S U D A U",
    "system between turns": "T0 S U A S U",
    "system last": "T0 S U A U S",
    "system after result": "S U A1 R1 S A U",
    "no system": "T0 U A U",
    "two users": "T0 U U A U U",
    "tools": "S U A1 R1 A U",
    "text beside call": "U At1 R1 A U",
    "two calls": "U A12 R1 R2 A U",
    "results reversed": "U A12 R2 R1 A U",
    "orphan result": "U A R9 A U",
    "calls without tools": "T0 U A1 R1 A U",
    "control text": "U A Uc A1 Rc1 A Uc",
    "text of a result": "U A Ur A1 Rr1 A Ur",
    "text of thinking": "U A Uk A1 Rk1 A Uk",
    "empty contents": "U Ae Ue A1 Re1 Ae U",
    "thinking": "U Ah U Ah1 R1 A U",
    "thinking beside call": "U Ath1 R1 A2 R2 A U",
    "forced call": "S U A U Amb1 R1 A U",
    "prefill": "T0 S U A U Amb U",
    "many turns": "S U" + " A1 R1 A2 R2" * 10 + " A U",
}
SHAPES = (
    *(Play(name=name, line=line) for name, line in _LINES.items()),
    Play(name="thinking off", line="S U A U A1 R1 A U", options={"enable_thinking": False}),
    Play(name="no description", line=_CALLED, tools=[_tool("look_up", description=...)]),
    Play(name="null description", line=_CALLED, tools=[_tool("look_up", description=None)]),
    Play(name="no parameters", line=_CALLED, tools=[_tool("look_up", parameters=...)]),
    Play(name="values", line=_CALLED, arguments=_VALUES),
    Play(name="null arguments", line=_CALLED, arguments="null"),
    Play(name="empty arguments", line=_CALLED, arguments=""),
    Play(name="list arguments", line=_CALLED, arguments='["MARK"]'),
    Play(name="broken arguments", line=_CALLED, arguments='{"MARK": '),
)


def random_play(numbers: random.Random) -> Play:
    """Return a random walk through the shapes, with what agents do to a conversation."""

    def said(role: str, texts: Sequence[str] = ("", "", "", *"lwecr")) -> str:
        return role + numbers.choice(texts)

    def answered() -> str:
        calls = numbers.choice(("", "", "1", "2", "12", "13"))
        flags = numbers.choice(("", "", "t", "tl", "tw") if calls else ("", "", *"lwe")) + numbers.choice(("", "h"))
        if numbers.random() < 0.85:
            flags += "m" + "".join(habit for habit in "bpixodsn" if numbers.random() < 0.12)
        results = calls if numbers.random() < 0.8 else reversed(calls)
        return " ".join([f"A{flags}{calls}", *(f"{said('R')}{call}" for call in results)])

    words = [*(said(role) for role, share in (("S", 0.6), ("D", 0.1)) if numbers.random() < share), said("U")]
    for _ in range(numbers.randrange(1, 8)):
        do = numbers.random()
        action = numbers.choice(("B1", "B2", "B3", "F", "G", "T0", "T1", "T2"))
        words.append(answered() if do < 0.5 else said(numbers.choice("UUUSD")) if do < 0.8 else action)
    return Play(name="random", line=" ".join((*numbers.choice(((), (), ("T0",))), *words, said("U"))))
