"""The messages and tools of a request, checked and normalised for the chat template and for comparison.

Normalised: content is one string, arguments of tool calls are the parsed object, keys without a value are gone.

Tools with `strict: true`: a call of theirs reaches the agent only when its arguments match their schema.

No grammar holds the model to it while it samples; a call that does not match is a malformed one, and stays text.

Which tools an answer may or must call. It knows no format of calls.

The tools of requests, checked and their strict schemas compiled: once for each text, since an agent repeats them.

What a set of tools is remembered by is its JSON, to the byte: `1`, `1.0` and `true` are equal in Python and not there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, Self

import jsonschema_rs
import orjson

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import (
    as_flag,
    as_list,
    as_name,
    as_object,
    as_shallow_object,
    as_text,
    refuse,
    refuse_unknown,
)
from areal_agent.tokens.canonical import parse_json_object
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.types import JsonObject

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""OpenAI's, and with a dot. A name begins a forced call as it is: it must be no text of a special token."""

_KEYS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content", "parsed"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}


def read_message(value: object, index: int) -> JsonObject:
    """Check and normalise one of `messages`; raises RequestError naming the place."""
    return _message(value, f"messages[{index}]")


def read_tools(value: object) -> tuple[JsonObject, ...]:
    """Check `tools`; they are kept as they are, key order included: the template prints them."""
    tools = as_list(value, "tools")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return tuple(tools)


def _message(value: object, param: str) -> JsonObject:
    message = as_object(value, param)
    role = message.get("role")
    keys = _KEYS.get(role) if isinstance(role, str) else None
    if keys is None or not isinstance(role, str):
        refuse(f"{param}.role", role, f"one of {', '.join(_KEYS)}")
    _refuse_unsupported(message, keys, param)
    normalised: dict[str, Any] = {
        "role": "system" if role == "developer" else role,  # a chat template knows no developer
        "content": _content(message.get("content"), f"{param}.content", is_optional=role == "assistant"),
    }
    for key in ("name", "tool_call_id", "reasoning_content"):
        if message.get(key) is not None:
            normalised[key] = as_text(message[key], f"{param}.{key}")
    if message.get("tool_calls"):
        calls = as_list(message["tool_calls"], f"{param}.tool_calls")
        normalised["tool_calls"] = [_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return normalised


def _refuse_unsupported(message: JsonObject, keys: frozenset[str], param: str) -> None:
    """Client libraries echo answers with all their fields: those that are empty say nothing.

    Nor does `parsed`, which OpenAI's client adds: the content once more.
    """
    for key in message.keys() - keys:
        if message[key]:
            raise RequestError(
                f"{param}.{key} is not supported in a message of role {message['role']!r}; leave it out",
                param=f"{param}.{key}",
                code="unknown_parameter",
            )


def _content(value: object, param: str, *, is_optional: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and is_optional:
        return ""
    if isinstance(value, list):
        return "".join(_text_part(part, f"{param}[{index}]") for index, part in enumerate(as_list(value, param)))
    return refuse(param, value, "a string or a list of text parts")


def _text_part(value: object, param: str) -> str:
    part = as_shallow_object(value, param)  # it is kept as it came
    if part.get("type") != "text":
        raise RequestError(
            f"{param} has type {part.get('type')!r:.80}: this gateway takes text only, no images, audio or files; "
            "send {'type': 'text', 'text': ...}",
            param=param,
            code="unsupported_content",
        )
    return as_text(part.get("text"), f"{param}.text")


def _tool_call(value: object, param: str) -> JsonObject:
    call = as_shallow_object(value, param)  # it is kept as it came
    if call.get("type", "function") != "function":
        refuse(f"{param}.type", call["type"], "'function'")
    function = as_object(call.get("function"), f"{param}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = as_shallow_object(arguments, f"{param}.function.arguments")
    else:
        text = as_text(arguments, f"{param}.function.arguments")
        arguments = parse_json_object(text) if text.strip() else {}  # some clients echo no arguments as no text
        arguments = text if arguments is None else arguments
    return {
        "id": as_text(call.get("id") or "", f"{param}.id"),
        "type": "function",
        "function": {"name": as_text(function.get("name"), f"{param}.function.name"), "arguments": arguments},
    }


def _check_tool(value: object, param: str) -> None:
    tool = as_shallow_object(value, param)
    if tool.get("type") != "function":
        refuse(f"{param}.type", tool.get("type"), "'function'")
    function = as_object(tool.get("function"), f"{param}.function")
    refuse_unknown(function, {"name", "description", "parameters", "strict"}, f"{param}.function.")
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        refuse(f"{param}.function.name", name, "of 1 to 64 letters, digits, '_', '-' and '.'")
    as_flag(function.get("strict"), f"{param}.function.strict")
    if function.get("parameters") is not None:
        as_object(function["parameters"], f"{param}.function.parameters")


Accepts = Callable[[ToolCall], bool]

LINEAR_PATTERNS = jsonschema_rs.RegexOptions()
"""Regular expressions without backtracking: a schema comes from outside and must not hold up the event loop."""


def strict_tools(tools: Sequence[JsonObject]) -> Accepts | None:
    """What decides whether a call may be one; None when no tool is strict.

    Raises RequestError for a schema that is none, or that refers to another document.
    """
    validators = {
        tool["function"]["name"]: _validator(tool["function"].get("parameters"), f"tools[{index}].function.parameters")
        for index, tool in enumerate(tools)
        if tool["function"].get("strict")
    }
    return _Accepts(validators) if validators else None


class _Accepts:
    """Calls of other tools are accepted as they are."""

    def __init__(self, validators: Mapping[str, "jsonschema_rs.Validator"]) -> None:
        self._validators = validators

    def __call__(self, call: ToolCall) -> bool:
        validator = self._validators.get(call.name)
        return validator is None or validator.is_valid(call.arguments)


def _validator(schema: JsonObject | None, param: str) -> "jsonschema_rs.Validator":
    try:
        return jsonschema_rs.validator_for(
            dict(schema or {}), retriever=_refuse_reference, pattern_options=LINEAR_PATTERNS
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:  # ValidationError is a ValueError
        raise RequestError(
            f"{param} is no JSON schema that can be checked ({error!s:.300}); mend it, or leave out 'strict'",
            param=param,
            code="invalid_value",
        ) from error


def _refuse_reference(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is another document; write its definitions into the schema")


class ToolUse(StrEnum):
    """What the model may do with the tools."""

    AUTO = "auto"  # it decides
    NONE = "none"  # what looks like a call is text
    REQUIRED = "required"  # its answer begins with a call


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """`tool_choice` and `parallel_tool_calls` of a body. A named tool is called once."""

    use: ToolUse
    name: str | None  # the one tool that must be called
    is_single: bool  # the answer ends with its first call

    @classmethod
    def read(cls, body: JsonObject, tools: Sequence[JsonObject]) -> Self:
        """Take it from a body with these tools; raises RequestError when it asks for what cannot be."""
        use, name = _read_use(body.get("tool_choice"), tools)
        parallel = body.get("parallel_tool_calls")
        is_single = parallel is not None and not as_flag(parallel, "parallel_tool_calls")
        return cls(use=use, name=name, is_single=name is not None or (is_single and use is not ToolUse.NONE))

    @property
    def may_call(self) -> bool:
        return self.use is not ToolUse.NONE


def _read_use(value: object, tools: Sequence[JsonObject]) -> tuple[ToolUse, str | None]:
    if value is None:
        return (ToolUse.AUTO if tools else ToolUse.NONE), None
    if isinstance(value, dict):
        return ToolUse.REQUIRED, _read_named(as_object(value, "tool_choice"), tools)
    if not isinstance(value, str) or value not in list(ToolUse):
        refuse("tool_choice", value, "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}")
    if value == ToolUse.REQUIRED and not tools:
        refuse("tool_choice", value, "'none' or left out where there are no tools")
    return ToolUse(value) if tools else ToolUse.NONE, None


def _read_named(choice: JsonObject, tools: Sequence[JsonObject]) -> str:
    refuse_unknown(choice, ("type", "function"), "tool_choice.")
    if choice.get("type") != "function":
        refuse("tool_choice.type", choice.get("type"), "'function'")
    function = as_object(choice.get("function"), "tool_choice.function")
    refuse_unknown(function, ("name",), "tool_choice.function.")
    name = as_name(function.get("name"), "tool_choice.function.name")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        refuse("tool_choice.function.name", name, f"one of the tools: {', '.join(names) or 'there are none'}")
    return name


MAX_SETS = 64
MAX_SET_BYTES = 2**16
"""A longer set is checked anew each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """A set of tools that was checked. Requests share it: nobody changes the definitions."""

    definitions: Sequence[JsonObject]
    accepts: Accepts | None  # what a call must be, where a tool is strict

    @classmethod
    def read(cls, value: object) -> Self:
        """Check `tools`; raises RequestError naming the place."""
        definitions = read_tools(value)
        return cls(definitions=definitions, accepts=strict_tools(definitions))


class KnownTools:
    """The sets of tools that were used last."""

    def __init__(self) -> None:
        self._sets: dict[bytes, Tools] = {}  # by their JSON; the one used last is the last

    def read(self, value: object) -> Tools:
        """As `Tools.read`, which is asked only for what is new. What is wrong is not remembered."""
        try:
            text = orjson.dumps(value)
        except orjson.JSONEncodeError:  # too deep to be written: it will be refused
            return Tools.read(value)
        tools = self._sets.pop(text, None) or Tools.read(value)
        if len(text) <= MAX_SET_BYTES:
            self._sets[text] = tools
        if len(self._sets) > MAX_SETS:
            del self._sets[next(iter(self._sets))]
        return tools
