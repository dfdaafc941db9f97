"""`/v1/chat/completions`: the body of a request, and the body of its answer.

Every parameter of OpenAI's is honoured, or refused by name when its value asks for something: none is dropped.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from areal_agent.errors import RequestError
from areal_agent.gateway.conversation import read_messages, read_tools
from areal_agent.gateway.fields import as_integer, as_text, refuse, refuse_unknown
from areal_agent.gateway.sampling import MAX_SEED, SamplingWishes
from areal_agent.tokens.json_text import format_json
from areal_agent.tokens.tool_calls import ParsedAnswer, parse_answer
from areal_agent.types import FinishReason, JsonObject

MAX_CHOICES = 128

_HONOURED = frozenset(
    {
        "model",
        "messages",
        "tools",
        "tool_choice",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "seed",
        "n",
    }
)
# They say nothing about the answer.
_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
# Not supported: the values beside null with which they ask for nothing.
_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop": ([],),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_KNOWN = _HONOURED | _HARMLESS | _UNSUPPORTED.keys()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked body. `messages` are normalised (see `conversation`), `sent_messages` are what the agent wrote."""

    model: str
    messages: tuple[JsonObject, ...]
    sent_messages: tuple[JsonObject, ...]
    tools: tuple[JsonObject, ...]
    may_call_tools: bool
    wishes: SamplingWishes
    seed: int | None
    num_choices: int

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        """Check a decoded body; raises RequestError naming the parameter that cannot be honoured."""
        _refuse_unsupported(body)
        seed, num_choices = body.get("seed"), body.get("n")
        return cls(
            model=as_text(body.get("model"), "model"),
            messages=read_messages(body.get("messages")),
            sent_messages=tuple(body["messages"]),
            tools=() if body.get("tools") is None else read_tools(body["tools"]),
            may_call_tools=_read_tool_choice(body.get("tool_choice")),
            wishes=SamplingWishes.read(body),
            seed=None if seed is None else as_integer(seed, "seed", low=-MAX_SEED - 1, high=MAX_SEED) & MAX_SEED,
            num_choices=1 if num_choices is None else as_integer(num_choices, "n", low=1, high=MAX_CHOICES),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One answer, read from its text."""

    content: str
    tool_calls: tuple[JsonObject, ...]  # normalised, with ids
    finish_reason: str
    num_malformed: int

    @classmethod
    def read(cls, text: str, finish_reason: FinishReason, *, may_call_tools: bool) -> Self:
        """Split a sampled text into content and tool calls; with `tool_choice: none` all of it is content."""
        parsed = parse_answer(text) if may_call_tools else ParsedAnswer(content=text)
        calls = tuple(
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        )
        return cls(
            content=parsed.content,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else finish_reason.value,
            num_malformed=parsed.num_malformed,
        )

    @property
    def message(self) -> JsonObject:
        """As a normalised message: what the next request is expected to repeat."""
        return {"role": "assistant", "content": self.content, "tool_calls": self.tool_calls}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """What a turn gave: the answers and the figures for `usage`."""

    id: str
    model: str
    created_s: int
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int

    def body(self) -> dict[str, Any]:
        """The `chat.completion` object."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created_s,
            "model": self.model,
            "choices": [_choice_body(index, choice) for index, choice in enumerate(self.choices)],
            "usage": {
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self.num_sampled_tokens,
                "total_tokens": self.num_prompt_tokens + self.num_sampled_tokens,
                "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            },
        }


def completion_ids(answer_id: str, num_choices: int) -> tuple[str, ...]:
    """The ids of an answer's completions.

    >>> completion_ids("chatcmpl-7", 1), completion_ids("chatcmpl-7", 2)
    (('chatcmpl-7',), ('chatcmpl-7-0', 'chatcmpl-7-1'))
    """
    return (answer_id,) if num_choices == 1 else tuple(f"{answer_id}-{index}" for index in range(num_choices))


def _choice_body(index: int, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.tool_calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [_call_body(call) for call in choice.tool_calls]
    return {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}


def _call_body(call: JsonObject) -> dict[str, Any]:
    function = call["function"]
    arguments = format_json(function["arguments"])
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _refuse_unsupported(body: JsonObject) -> None:
    refuse_unknown(body, _KNOWN)
    for name in _UNSUPPORTED.keys() & body.keys():
        value = body[name]
        if value is not None and value not in _UNSUPPORTED[name]:
            raise RequestError(
                f"{name}={value!r:.200} is not supported by this gateway; leave it out",
                param=name,
                code="unsupported_parameter",
            )


def _read_tool_choice(value: object) -> bool:
    if value in (None, "auto"):
        return True
    if value == "none":
        return False
    return refuse("tool_choice", value, "'auto' or 'none'; this gateway cannot force a call")
