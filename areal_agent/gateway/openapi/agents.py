"""The calls of agents: chat completions."""

from typing import Any

from areal_agent.gateway.openapi.parts import (
    JsonSchema,
    closed_object,
    list_of,
    one_of,
    optional,
    ref,
    text,
)

_TEXT_PARTS = list_of(closed_object({"type": {"const": "text"}, "text": text()}, ["type", "text"]))
_CONTENT = {"anyOf": [text(), _TEXT_PARTS]}

_CALL = {
    "type": "object",
    "properties": {
        "id": text(),
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": text(), "arguments": {"anyOf": [text(), {"type": "object"}]}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}

SCHEMAS: dict[str, JsonSchema] = {
    "ToolCall": _CALL,
    "Message": {
        "oneOf": [
            closed_object(
                {"role": one_of("system", "developer", "user"), "content": _CONTENT} | optional(name=text()),
                ["role", "content"],
            ),
            closed_object(
                {"role": {"const": "assistant"}}
                | optional(
                    content=_CONTENT, name=text(), reasoning_content=text(), tool_calls=list_of(ref("ToolCall"))
                ),
                ["role"],
            ),
            closed_object(
                {"role": {"const": "tool"}, "content": _CONTENT} | optional(name=text(), tool_call_id=text()),
                ["role", "content"],
            ),
        ]
    },
}
PATHS: dict[str, Any] = {}
