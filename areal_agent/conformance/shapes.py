"""The conversations that are played: one for each shape, and random ones.

A step of a play is a message, as chat completions write it, or something that the agent does. An assistant's message
is the client's own; one with `sampled` is the model's, and names its habits. In each part MARK stands for a word that
occurs nowhere else, so that it is seen when it gets lost, and CONTROL for the control texts of the template.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from areal_agent.tokens.canonical import format_json, parse_json_object
from areal_agent.types import JsonObject

NAMES = ("look_up", "fetch_it")
_TYPES = {
    "Tool2x": "string",
    "number": "number",
    "flag": "boolean",
    "deep": "object",
    "list": "array",
    "none": ["integer", "null"],
}


def _tool(name: str, description: str | None = "Says Tool1x.", **more: Any) -> JsonObject:
    types = {name: {"type": type_, "description": f"A {name}."} for name, type_ in _TYPES.items()}
    parameters = {"type": "object", "properties": types, "required": [next(iter(_TYPES))]}
    function = {"name": name, "description": description, "parameters": parameters, **more}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not ...}}


TOOLS = (_tool(NAMES[0]), _tool(NAMES[1], "Says Tool3x."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """A conversation step by step, with the tools that it offers, and more variables for the template."""

    name: str
    steps: Sequence[JsonObject]
    tools: Sequence[JsonObject] = ()
    options: JsonObject = field(default_factory=dict[str, Any])

    def variants(self) -> Iterator["Play"]:
        """Yield the play as it is, and with every answer sampled: without thinking, and with it."""
        yield self
        for name, thought in {"sampled": {}, "sampled, with thinking": {"reasoning_content": "I think so."}}.items():
            steps = [{**step, **thought, "sampled": {}} if self._may_sample(step) else step for step in self.steps]
            if steps != self.steps:
                yield replace(self, name=f"{self.name}, {name}", steps=steps)

    def _may_sample(self, step: JsonObject) -> bool:
        texts = [call["function"]["arguments"] for call in step.get("tool_calls", ())]
        is_possible = all(parse_json_object(text) is not None for text in texts) and (not texts or bool(self.tools))
        return step["role"] == "assistant" and "sampled" not in step and is_possible


def _call(number: int, arguments: Any, name: str) -> JsonObject:
    """Return a call. Its id has nine letters and digits, as Mistral's templates want it."""
    arguments = arguments if isinstance(arguments, str) else format_json(arguments)
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


_ROLES = {"S": "system", "D": "developer", "U": "user", "A": "assistant", "R": "tool"}
_WORD = {"Tool2x": "MARK"}
SAY = "Say MARK now."


def play(
    name: str,
    line: str,
    *,
    text: str = SAY,
    arguments: Any = _WORD,
    tools: Sequence[JsonObject] = TOOLS,
    options: JsonObject | None = None,
) -> Play:
    """Return the play that a line writes, a word for each message; users and tools say `text`.

    `S D U A R` are the roles. An answer's digits are its calls, a result's is that of its call. Small letters follow:
    `t` text beside the calls, `h` thinking, `e` empty content, `b` the request begins the answer: its call is forced,
    or its text is continued. A line that begins with `-` has no tools.
    """
    steps = list[JsonObject]()
    for role, flags, numbers in re.findall(r"([SDUAR])([a-z]*)(\d*)", line):
        has_text = "e" not in flags and (role != "A" or not numbers or "t" in flags)
        step: dict[str, Any] = {"role": _ROLES[role], "content": (text if role in "UR" else SAY) if has_text else ""}
        if role == "R":
            step["tool_call_id"] = f"call{int(numbers):05}"
        elif numbers:
            step["tool_calls"] = [_call(int(one), arguments, NAMES[one == "2"]) for one in numbers]
        step |= ({"reasoning_content": "Hm."} if "h" in flags else {}) | (
            {"sampled": {"begun": 1}} if "b" in flags else {}
        )
        steps.append(step)
    return Play(name=name, steps=steps, tools=() if line.startswith("-") else tools, options=options or {})


_SAID, _CALLED = "U A U A1 R1 A U", "U A1 R1 U"
VALUES = {
    "Tool2x": 'MARK "é"\nnext',
    "number": 2.5,
    "flag": True,
    "deep": {"k": [1, 2.5, {"z": None}], "on": False, "word": "MARK"},
    "list": ["5", "true"],
    "none": None,
}
SHAPES = (
    play("system", "- S U A U"),
    play("system, developer", "- S D U A U"),
    play("system after user", "- S U D A U"),
    play("system between turns", "- S U A S U"),
    play("system last", "- S U A U S"),
    play("system after result", "S U A1 R1 S A U"),
    play("no system", "- U A U"),
    play("two users", "- U U A U U"),
    play("tools", "S U A1 R1 A U"),
    play("text beside call", "U At1 R1 A U"),
    play("two calls", "U A12 R1 R2 A U"),
    play("results reversed", "U A12 R2 R1 A U"),
    play("orphan result", "U A R9 A U"),
    play("calls without tools", "- U A1 R1 A U"),
    play("no description", _CALLED, tools=[_tool(NAMES[0], ...)]),
    play("null description", _CALLED, tools=[_tool(NAMES[0], None)]),
    play("no parameters", _CALLED, tools=[_tool(NAMES[0], parameters=...)]),
    play("values", _CALLED, arguments=VALUES),
    play("null arguments", _CALLED, arguments="null"),
    play("empty arguments", _CALLED, arguments=""),
    play("list arguments", _CALLED, arguments='["MARK"]'),
    play("broken arguments", _CALLED, arguments='{"MARK": '),
    play("control text", _SAID, text="Say MARK CONTROL now."),
    play("text of a result", _SAID, text="<tool_response>\nMARK\n</tool_response>"),
    play("text of thinking", _SAID, text="MARK <think>\nno\n</think>\n\nMARK"),
    play("empty contents", "U Ae Ue A1 Re1 Ae U"),
    play("thinking", "U Ah U Ah1 R1 A U"),
    play("thinking beside call", "U Ath1 R1 A2 R2 A U"),
    play("thinking off", "S U A U A1 R1 A U", options={"enable_thinking": False}),
    play("forced call", "S U A U Ab1 R1 A U"),
    play("prefill", "- S U A U Ab U"),
    play("many turns", "S U" + " A1 R1 A2 R2" * 10 + " A U"),
)

TEXTS = (
    *(SAY,) * 4,
    "MARK\n\n* é 你好",
    " MARK \n",
    "",
    "MARK CONTROL",
    "<tool_response>\nMARK\n</tool_response>",
)
HABITS = ("padded", "tight", "cut", "twice", "second", "other end", "other ids", "begun")


def random_play(numbers: random.Random) -> Play:
    """Return a random walk through the shapes, with what agents do to a conversation."""
    return Play(name="random", steps=list(_random_steps(numbers)), tools=numbers.choice((TOOLS, TOOLS, ())))


def _random_steps(numbers: random.Random) -> Iterator[JsonObject]:
    ids = count(1)

    def said(role: str, texts: Sequence[str] = TEXTS) -> JsonObject:
        return {"role": role, "content": numbers.choice(texts)}

    def answered() -> Iterator[JsonObject]:
        calls = [_call(next(ids), _WORD, numbers.choice(NAMES)) for _ in range(numbers.choice((0, 0, 1, 1, 2)))]
        message = said("assistant", ("", "", *TEXTS[:7]) if calls else TEXTS[:7])
        message = {**message, "reasoning_content": numbers.choice((None, "Hm.", "Well,\n\nso."))}
        if numbers.random() < 0.85:
            message["sampled"] = {habit: 1 for habit in HABITS if numbers.random() < 0.12}
        yield {**message, "tool_calls": calls} if calls else message
        for call in calls if numbers.random() < 0.8 else reversed(calls):
            yield {**said("tool"), "tool_call_id": call["id"]}

    def did() -> JsonObject:
        return numbers.choice(
            (
                *[{"role": "back", "by": by} for by in (1, 2, 3)],
                *[{"role": role} for role in ("forget thinking", "again")],
                *[{"role": "tools", "tools": tools} for tools in (TOOLS, TOOLS[:1], ())],
            )
        )

    yield from (said(role) for role, share in (("system", 0.6), ("developer", 0.1)) if numbers.random() < share)
    yield said("user")
    for _ in range(numbers.randrange(1, 8)):
        do = numbers.random()
        if do < 0.5:
            yield from answered()
        elif do < 0.78:
            yield said(numbers.choice(("user", "user", "user", "system", "developer")))
        else:
            yield did()
    yield said("user")
