"""The conversations that are played: one for each shape, and random ones.

A step of a play is a message, as chat completions write it, or something that the agent does. An assistant's message
is the client's own; one with `sampled` is the model's. In each part MARK stands for a word that occurs nowhere else, so
that it is seen when it gets lost, and CONTROL for the control texts of the template.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from areal_agent.tokens.canonical import format_json, parse_json_object
from areal_agent.types import JsonObject

LOOK_UP, FETCH = "look_up", "fetch_it"


def _tool(name: str, word: str, description: str) -> JsonObject:
    properties = {
        word: {"type": "string", "description": "A word."},
        "number": {"type": "number", "description": "A number."},
        "flag": {"type": "boolean", "description": "Whether."},
        "deep": {"type": "object", "description": "More."},
        "list": {"type": "array", "description": "Several.", "items": {"type": "string"}},
        "none": {"type": ["integer", "null"], "description": "Nothing."},
    }
    parameters = {"type": "object", "properties": properties, "required": [word]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_WORD = "Tool1x"
TOOLS = (_tool(LOOK_UP, _WORD, "Says Tool2x."), _tool(FETCH, "Tool3x", "Says Tool4x."))


def _changed(**change: Any) -> tuple[JsonObject, ...]:
    """Return the tools with another value of a field; `...` leaves it out."""
    functions = [{**tool["function"], **change} for tool in TOOLS]
    return tuple(
        {"type": "function", "function": {name: value for name, value in function.items() if value is not ...}}
        for function in functions
    )


def _message(role: str, text: str = "Say MARK now.") -> JsonObject:
    return {"role": role, "content": text}


def _call(number: int, arguments: Any = None, *, name: str = LOOK_UP) -> JsonObject:
    """Return a call. Its id has nine letters and digits, as Mistral's templates want it."""
    if not isinstance(arguments, str):
        arguments = format_json(arguments or {_WORD: "MARK"})
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _calls(*calls: JsonObject, text: str = "", thought: str | None = None) -> JsonObject:
    return {**_message("assistant", text), "tool_calls": list(calls), "reasoning_content": thought}


def _result(call: JsonObject, text: str = "Got MARK.") -> JsonObject:
    return {**_message("tool", text), "tool_call_id": call["id"]}


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
        for name, thought in {"sampled": None, "sampled, with thinking": "I think so."}.items():
            steps = [_sampled(step, thought, may_call=bool(self.tools)) for step in self.steps]
            if steps != self.steps:
                yield replace(self, name=f"{self.name}, {name}", steps=steps)


def _sampled(step: JsonObject, thought: str | None, *, may_call: bool) -> JsonObject:
    """Return an answer as the model's, unless no model can write its calls."""
    texts = [call["function"]["arguments"] for call in step.get("tool_calls", ())]
    is_possible = may_call or not texts
    if (
        step["role"] != "assistant"
        or "sampled" in step
        or not is_possible
        or any(parse_json_object(text) is None for text in texts)
    ):
        return step
    return {**step, **({"reasoning_content": thought} if thought else {}), "sampled": {}}


S, D, U, A = (_message(role) for role in ("system", "developer", "user", "assistant"))
ONE, TWO = _call(1), _call(2, name=FETCH)
CALL, RESULT = _calls(ONE), _result(ONE)
VALUES = {
    _WORD: 'MARK "é"\nnext',
    "number": 2.5,
    "flag": True,
    "deep": {"k": [1, 2.5, {"z": None}], "on": False, "word": "MARK"},
    "list": ["5", "true"],
    "none": None,
}
_LOOP = [part for number in range(10, 31) for part in (_calls(_call(number)), _result(_call(number)))]


def _begun(step: JsonObject) -> JsonObject:
    """Return an answer that the request begins: its call is forced, or its text is continued."""
    return {**step, "sampled": {"begun": True}}


def _with(text: str) -> list[JsonObject]:
    """Return a conversation in which the user and a tool say this."""
    return [U, A, _message("user", text), CALL, _result(ONE, text), A, _message("user", text)]


def _calling(arguments: Any) -> list[JsonObject]:
    return [U, _calls(_call(1, arguments)), RESULT, U]


SHAPES = (
    Play(name="system", steps=[S, U, A, U]),
    Play(name="system, developer", steps=[S, D, U, A, U]),
    Play(name="system after user", steps=[S, U, D, A, U]),
    Play(name="system between turns", steps=[S, U, A, S, U]),
    Play(name="system last", steps=[S, U, A, U, S]),
    Play(name="system after result", steps=[S, U, CALL, RESULT, S, A, U], tools=TOOLS),
    Play(name="no system", steps=[U, A, U]),
    Play(name="two users", steps=[U, U, A, U, U]),
    Play(name="tools", steps=[S, U, CALL, RESULT, A, U], tools=TOOLS),
    Play(name="text beside call", steps=[U, _calls(ONE, text="I look: MARK."), RESULT, A, U], tools=TOOLS),
    Play(name="two calls", steps=[U, _calls(ONE, TWO), RESULT, _result(TWO), A, U], tools=TOOLS),
    Play(name="results reversed", steps=[U, _calls(ONE, TWO), _result(TWO), RESULT, A, U], tools=TOOLS),
    Play(name="orphan result", steps=[U, A, _result(_call(9)), A, U], tools=TOOLS),
    Play(name="calls without tools", steps=[U, CALL, RESULT, A, U]),
    Play(name="no description", steps=[U, CALL, RESULT, U], tools=_changed(description=...)),
    Play(name="null description", steps=[U, CALL, RESULT, U], tools=_changed(description=None)),
    Play(name="no parameters", steps=[U, CALL, RESULT, U], tools=_changed(parameters=...)),
    Play(name="values", steps=_calling(VALUES), tools=TOOLS),
    Play(name="null arguments", steps=_calling("null"), tools=TOOLS),
    Play(name="empty arguments", steps=_calling(""), tools=TOOLS),
    Play(name="list arguments", steps=_calling('["MARK"]'), tools=TOOLS),
    Play(name="broken arguments", steps=_calling('{"MARK": '), tools=TOOLS),
    Play(name="control text", steps=_with("Say MARK CONTROL now."), tools=TOOLS),
    Play(name="text of a result", steps=_with("<tool_response>\nMARK\n</tool_response>"), tools=TOOLS),
    Play(name="text of thinking", steps=_with("MARK <think>\nno\n</think>\n\nMARK"), tools=TOOLS),
    Play(
        name="empty contents",
        steps=[
            U,
            _message("assistant", ""),
            _message("user", ""),
            CALL,
            _result(ONE, ""),
            _message("assistant", " \n"),
            U,
        ],
        tools=TOOLS,
    ),
    Play(
        name="thinking",
        steps=[U, {**A, "reasoning_content": "Hm."}, U, _calls(ONE, thought="So."), RESULT, A, U],
        tools=TOOLS,
    ),
    Play(
        name="thinking beside call",
        steps=[U, _calls(ONE, text="I look: MARK.", thought="So."), RESULT, _calls(TWO), _result(TWO), A, U],
        tools=TOOLS,
    ),
    Play(name="many turns", steps=[S, U, *_LOOP, A, U], tools=TOOLS),
    Play(name="thinking off", steps=[S, U, A, U, CALL, RESULT, A, U], tools=TOOLS, options={"enable_thinking": False}),
    Play(name="forced call", steps=[S, U, A, U, _begun(CALL), RESULT, A, U], tools=TOOLS),
    Play(name="prefill", steps=[S, U, A, U, _begun(A), U]),
)

TEXTS = (
    *("Say MARK now.",) * 4,
    "MARK\n\n* é 你好",
    " MARK \n",
    "MARK CONTROL",
    "<tool_response>\nMARK\n</tool_response>",
    "",
)
SAMPLED = (*TEXTS[:6], "")


def random_play(numbers: random.Random) -> Play:
    """Return a random walk through the shapes, with what agents do to a conversation."""
    return Play(name="random", steps=list(_random_steps(numbers)), tools=numbers.choice((TOOLS, TOOLS, ())))


def _random_steps(numbers: random.Random) -> Iterator[JsonObject]:
    ids = count(1)

    def said(role: str) -> JsonObject:
        return _message(role, numbers.choice(TEXTS))

    def answered() -> Iterator[JsonObject]:
        calls = [
            _call(next(ids), name=numbers.choice((LOOK_UP, FETCH))) for _ in range(numbers.choice((0, 0, 1, 1, 2)))
        ]
        text = numbers.choice(SAMPLED if not calls else ("", "", *SAMPLED))
        message = {**_message("assistant", text), "reasoning_content": numbers.choice((None, "Hm.", "Well,\n\nso."))}
        if numbers.random() < 0.85:
            habits = ("padded", "tight", "cut", "twice", "second", "other end", "other ids", "begun")
            message["sampled"] = {habit: True for habit in habits if numbers.random() < 0.12}
        yield {**message, "tool_calls": calls} if calls else message
        for call in calls if numbers.random() < 0.8 else reversed(calls):
            yield _result(call, numbers.choice(TEXTS))

    if numbers.random() < 0.6:
        yield said("system")
        if numbers.random() < 0.2:
            yield said("developer")
    yield said("user")
    for _ in range(numbers.randrange(1, 8)):
        do = numbers.random()
        if do < 0.5:
            yield from answered()
        elif do < 0.72:
            yield said("user")
        elif do < 0.78:
            yield said(numbers.choice(("system", "developer")))
        elif do < 0.88:
            yield {"role": "back", "by": numbers.randrange(1, 4)}
        elif do < 0.92:
            yield {"role": "forget thinking"}
        elif do < 0.96:
            yield {"role": "again"}
        else:
            yield {"role": "tools", "tools": numbers.choice((TOOLS, TOOLS[:1], ()))}
    yield said("user")
