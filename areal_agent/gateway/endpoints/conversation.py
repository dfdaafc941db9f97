"""The messages and tools of a request, checked and normalised for the chat template and for comparison.

Normalised: content is one string, arguments of tool calls are the parsed object, keys without a value are gone.
"""

import re
from collections.abc import Mapping
from typing import Any

from areal_agent.errors import RequestError
from areal_agent.gateway.fields import (
    as_flag,
    as_list,
    as_object,
    as_shallow_object,
    as_text,
    refuse,
    refuse_unknown,
)
from areal_agent.tokens.json_text import parse_json_object
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
