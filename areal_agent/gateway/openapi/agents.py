"""The calls of agents: chat completions and completions. Their bodies are in sampling.py and messages.py."""

from typing import Any

from areal_agent.gateway.openapi.messages import MESSAGE_SCHEMAS
from areal_agent.gateway.openapi.parts import (
    JsonSchema,
    answer_object,
    closed_object,
    integer,
    list_of,
    one_of,
    operation,
    optional,
    ref,
    text,
)
from areal_agent.gateway.openapi.sampling import IGNORED, REFUSED, SAMPLING

_FINISH = one_of("stop", "length", "tool_calls")
_IDS = list_of(integer(low=0), minItems=1)

_CHAT = closed_object(
    {"model": text(), "messages": list_of(ref("Message"), minItems=1)}
    | optional(
        tools=list_of(ref("Tool")),
        tool_choice={"anyOf": [one_of("auto", "none", "required"), ref("NamedTool")]},
        parallel_tool_calls={"type": "boolean"},
        response_format=ref("ResponseFormat"),
        max_completion_tokens=integer(1, 2**31 - 1),
        logprobs={"type": "boolean"},
        top_logprobs=integer(0, 20),
    )
    | SAMPLING
    | IGNORED
    | REFUSED,
    ["model", "messages"],
)

_COMPLETION = closed_object(
    {
        "model": text(),
        "prompt": {"anyOf": [text(1), list_of(text(1), minItems=1), _IDS, list_of(_IDS, minItems=1)]},
    }
    | optional(
        echo={"type": "boolean"},
        logprobs=integer(0, 20),
        suffix={"const": ""},
        best_of={"const": 1},
        store={"const": False},
    )
    | SAMPLING
    | IGNORED,
    ["model", "prompt"],
)

SCHEMAS: dict[str, JsonSchema] = MESSAGE_SCHEMAS | {
    "ChatRequest": _CHAT,
    "ChatCompletion": answer_object(
        {
            "id": text(),
            "object": {"const": "chat.completion"},
            "created": integer(),
            "model": text(),
            "choices": list_of(ref("ChatChoice"), minItems=1),
            "usage": ref("Usage"),
        }
    ),
    "ChatChoice": answer_object(
        {"index": integer(low=0), "message": ref("Answer"), "finish_reason": _FINISH, "logprobs": {}}
    ),
    "CompletionRequest": _COMPLETION,
    "Completion": answer_object(
        {
            "id": text(),
            "object": {"const": "text_completion"},
            "created": integer(),
            "model": text(),
            "choices": list_of(
                answer_object({"index": integer(low=0), "text": text(), "finish_reason": _FINISH, "logprobs": {}}),
                minItems=1,
            ),
            "usage": ref("Usage"),
        }
    ),
    "Usage": answer_object(
        {"prompt_tokens": integer(low=0), "completion_tokens": integer(low=0), "total_tokens": integer(low=0)}
    ),
}

_ERRORS = (404, 409, 429, 502, 503)

PATHS: dict[str, Any] = {
    "/v1/chat/completions": {
        "post": operation(
            "createChatCompletion",
            "One turn. With `stream`, server-sent events of `chat.completion.chunk` objects, then `[DONE]`.",
            body=ref("ChatRequest"),
            answer=ref("ChatCompletion"),
            key="sessionKey",
            errors=_ERRORS,
            is_streamed=True,
        )
    },
    "/v1/completions": {
        "post": operation(
            "createCompletion",
            "One turn without a chat template: the prompt as text or ids.",
            body=ref("CompletionRequest"),
            answer=ref("Completion"),
            key="sessionKey",
            errors=_ERRORS,
            is_streamed=True,
        )
    },
}
