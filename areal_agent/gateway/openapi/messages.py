"""The conversation in a chat call: messages, tools, and the answer's message."""

from areal_agent.gateway.openapi.parts import (
    NAME,
    JsonSchema,
    answer_object,
    closed_object,
    list_of,
    nullable,
    one_of,
    optional,
    ref,
    text,
)

_TOOL_NAME: JsonSchema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}

_CONTENT: JsonSchema = {
    "anyOf": [text(), list_of(closed_object({"type": {"const": "text"}, "text": text()}, ["type", "text"]))]
}

_FUNCTION_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "name": text(),
        "arguments": {"anyOf": [text(), {"type": "object"}], "description": "JSON as text, or as it is."},
    },
    "required": ["name", "arguments"],
}

_FROM_OTHERS = closed_object(
    {"role": one_of("system", "developer", "user"), "content": _CONTENT} | optional(name=text()), ["role", "content"]
)
_FROM_ASSISTANT = closed_object(
    {"role": {"const": "assistant"}}
    | optional(
        content=_CONTENT,
        name=text(),
        reasoning_content=text(),
        tool_calls=list_of(ref("ToolCall")),
        parsed={"description": "What a client made of the content; ignored."},
    ),
    ["role"],
)
_FROM_TOOL = closed_object(
    {"role": {"const": "tool"}, "content": _CONTENT} | optional(name=text(), tool_call_id=text()), ["role", "content"]
)

MESSAGE_SCHEMAS: dict[str, JsonSchema] = {
    "Message": {"oneOf": [_FROM_OTHERS, _FROM_ASSISTANT, _FROM_TOOL]},
    "ToolCall": {
        "type": "object",
        "properties": {"id": text(), "type": {"const": "function"}, "function": _FUNCTION_CALL},
        "required": ["function"],
    },
    "Tool": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": closed_object(
                {"name": _TOOL_NAME}
                | optional(description={}, parameters={"type": "object"}, strict={"type": "boolean"}),
                ["name"],
            ),
        },
        "required": ["type", "function"],
    },
    "NamedTool": closed_object(
        {"type": {"const": "function"}, "function": closed_object({"name": _TOOL_NAME}, ["name"])}, ["type", "function"]
    ),
    "ResponseFormat": {
        "oneOf": [
            closed_object({"type": one_of("text", "json_object")}, ["type"]),
            closed_object(
                {
                    "type": {"const": "json_schema"},
                    "json_schema": closed_object(
                        {"name": NAME, "schema": {"type": "object"}}
                        | optional(description={}, strict={"type": "boolean"}),
                        ["name", "schema"],
                    ),
                },
                ["type", "json_schema"],
            ),
        ],
        "description": "Beside `text`: where the engine samples by a grammar; elsewhere refused.",
    },
    "Answer": answer_object({"role": {"const": "assistant"}, "content": nullable(text())})
    | {"description": "With `tool_calls` and `reasoning_content` where there are some."},
}
