"""`/v1/chat/completions`: the body of a request.

Every parameter of OpenAI's is honoured, or refused by name when its value asks for something: none is dropped.
`max_tokens` beyond the room in the context is cut to it, where OpenAI refuses.

The answer to a chat as JSON: a `chat.completion` object, or the chunks of a stream.

`response_format`: the JSON schema that an answer must match. It knows no grammar: the engine has one or not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import orjson

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Answer, Choice, call_id, chat_logprobs, completion_ids
from areal_agent.gateway.bodies import (
    as_flag,
    as_integer,
    as_list,
    as_name,
    as_object,
    as_shallow_object,
    as_text,
    refuse,
    refuse_unknown,
)
from areal_agent.gateway.conversation import Accepts, ToolChoice, Tools, ToolUse, read_message
from areal_agent.gateway.draft import ChatReading, Gain, Piece, TokenRow
from areal_agent.gateway.order import (
    HARMLESS_FIELDS,
    MAX_TOP_LOGPROBS,
    ORDER_FIELDS,
    Order,
    Question,
    refuse_unsupported,
)
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.forest import Forest, Opening, Prompt
from areal_agent.tokens.formats.base import AnswerDelta, ToolCall
from areal_agent.tokens.formats.reader import THINK_END
from areal_agent.tokens.renderer import Detokenizer, Renderer
from areal_agent.types import JsonObject


class ChatBody:
    """Writes the answer to one exchange."""

    def __init__(self, exchange: Exchange, detokenizer: Detokenizer) -> None:
        self._order = exchange.order
        self._detokenizer = detokenizer
        self._completion_ids = completion_ids(exchange.answer_id, exchange.num_choices)
        self._head = {"id": exchange.answer_id, "created": exchange.created_s, "model": exchange.model}

    # ------------------------------------------------------------------------------------------ at once

    def whole(self, answer: Answer) -> JsonObject:
        body: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": answer.usage(),
        }
        if self._order.has_token_ids:
            body["prompt_token_ids"] = list(answer.turns[0].prompt_ids)
        return body

    def _choice(self, choice: Choice) -> JsonObject:
        body: dict[str, Any] = {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": self._logprobs(choice.rows),
            "finish_reason": choice.finish_reason,
        }
        if self._order.has_token_ids:
            body["token_ids"] = choice.completion.token_ids
        return body

    # --------------------------------------------------------------------------------------- in chunks

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        """Before any text: who speaks."""
        for index in range(len(self._completion_ids)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self._order.has_token_ids and index == 0:
                chunk["prompt_token_ids"] = list(prompt_ids)
            yield chunk

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """What one answer gained: a chunk for each delta, the tokens with the first."""
        for number, delta in enumerate(piece.gain.deltas):
            body = _delta(delta, self._completion_ids[piece.index])
            yield self._chunk(piece.index, body, piece.gain if number == 0 else None)
        if not piece.gain.deltas and self._tells_tokens(piece.gain):
            yield self._chunk(piece.index, {}, piece.gain)

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """When all is recorded: why each answer ended, and the usage if that was asked for."""
        for choice in answer.choices:
            chunk = self._chunk(choice.index, {})
            chunk["choices"][0]["finish_reason"] = choice.finish_reason
            yield chunk
        if self._order.has_usage_chunk:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage()}

    def _chunk(self, index: int, delta: JsonObject, gain: Gain | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if gain is not None:
            choice["logprobs"] = self._logprobs(gain.rows)
            if self._order.has_token_ids:
                choice["token_ids"] = gain.token_ids
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._order.has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _tells_tokens(self, gain: Gain) -> bool:
        has_logprobs = self._order.num_top_logprobs is not None and bool(gain.rows)
        return has_logprobs or (self._order.has_token_ids and bool(gain.token_ids))

    def _logprobs(self, rows: tuple[TokenRow, ...]) -> JsonObject | None:
        num_top = self._order.num_top_logprobs
        return None if num_top is None else chat_logprobs(rows, num_top, self._detokenizer)


def _message(choice: Choice) -> JsonObject:
    parsed = choice.parsed
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            _call(call, call_id(choice.completion.id, index)) for index, call in enumerate(parsed.tool_calls)
        ]
    return message


def _call(call: ToolCall, id_: str) -> JsonObject:
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _delta(delta: AnswerDelta, completion_id: str) -> JsonObject:
    body: dict[str, Any] = {}
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.content:
        body["content"] = delta.content
    if delta.call is not None:
        call = _call(delta.call, call_id(completion_id, delta.call_index))
        body["tool_calls"] = [{"index": delta.call_index, **call}]
    return body


ANY_OBJECT = '{"type":"object"}'


def read_response_format(value: object) -> str | None:
    """The schema as JSON text, None for plain text; raises RequestError naming what is wrong.

    >>> read_response_format({"type": "json_object"})
    '{"type":"object"}'
    """
    if value is None:
        return None
    wanted = as_object(value, "response_format")
    match wanted.get("type"):
        case "text":
            refuse_unknown(wanted, ("type",), "response_format.")
            return None
        case "json_object":
            refuse_unknown(wanted, ("type",), "response_format.")
            return ANY_OBJECT
        case "json_schema":
            refuse_unknown(wanted, ("type", "json_schema"), "response_format.")
            return _read_schema(as_object(wanted.get("json_schema"), "response_format.json_schema"))
        case other:
            refuse("response_format.type", other, "'text', 'json_object' or 'json_schema'")


def _read_schema(wanted: JsonObject) -> str:
    where = "response_format.json_schema."
    refuse_unknown(wanted, ("name", "description", "schema", "strict"), where)
    as_name(wanted.get("name"), where + "name")
    as_flag(wanted.get("strict"), where + "strict")  # the grammar is always followed to the letter
    schema = as_shallow_object(wanted.get("schema"), where + "schema")
    return orjson.dumps(schema).decode()


_HONOURED = ORDER_FIELDS | {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "top_logprobs",
}
_KNOWN = _HONOURED | HARMLESS_FIELDS
_NO_TOOLS = Tools(definitions=(), accepts=None)

_UNSUPPORTED: Mapping[str, Sequence[object]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Not supported: the values beside null with which they ask for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked body. `messages` are as the agent wrote them: those that are new are checked in their place."""

    model: str
    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject]
    tool_choice: ToolChoice
    accepts: Accepts | None  # what a call must be, where a tool is strict
    json_schema: str | None
    order: Order

    id_prefix = "chatcmpl"
    prompt_param = "messages"

    @classmethod
    def read(cls, body: JsonObject, read_tools: Callable[[object], Tools] = Tools.read) -> Self:
        """Check a decoded body; raises RequestError naming the parameter that cannot be honoured."""
        refuse_unsupported(body, _KNOWN, _UNSUPPORTED)
        tools = _NO_TOOLS if body.get("tools") is None else read_tools(body["tools"])
        tool_choice = ToolChoice.read(body, tools.definitions)
        json_schema = read_response_format(body.get("response_format"))
        if json_schema is not None and tools.definitions and tool_choice.may_call:
            raise RequestError(
                "response_format holds the whole answer to JSON, so it could call no tool; send it without tools, or "
                "with tool_choice 'none'",
                param="response_format",
                code="unsupported_parameter",
            )
        return cls(
            model=as_text(body.get("model"), "model"),
            messages=_read_messages(body.get("messages")),
            tools=tools.definitions,
            tool_choice=tool_choice,
            accepts=tools.accepts,
            json_schema=json_schema,
            order=Order.read(body, num_top_logprobs=_read_logprobs(body)),
        )

    @property
    def is_single_call(self) -> bool:
        return self.tool_choice.is_single

    def questions(self) -> tuple[Question]:
        return (self,)

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        return forest.plan(self.messages, self.tools, normalise=read_message, opening=self._opening(renderer))

    def reading(self, renderer: Renderer, prompt: Prompt) -> ChatReading:
        return ChatReading(
            answer_format=renderer.answer_format,
            may_call_tools=self.tool_choice.may_call,
            is_thinking=prompt.is_thinking or THINK_END in prompt.opening,
            opening=prompt.opening,
            only_tool=self.tool_choice.name,
            accepts=self.accepts,
        )

    def _opening(self, renderer: Renderer) -> Opening | None:
        if self.tool_choice.use is not ToolUse.REQUIRED:
            return None
        return partial(renderer.answer_format.opening, self.tool_choice.name)


def _read_messages(value: object) -> list[JsonObject]:
    messages = as_list(value, "messages")
    if not messages:
        refuse("messages", value, "a list of at least one message")
    return messages


def _read_logprobs(body: JsonObject) -> int | None:
    """How many of the likeliest tokens to tell at each position; None when no log-probabilities are asked for."""
    has_logprobs, num_top = as_flag(body.get("logprobs"), "logprobs"), body.get("top_logprobs")
    if num_top is None:
        return 0 if has_logprobs else None
    num_top = as_integer(num_top, "top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if num_top and not has_logprobs:
        refuse("top_logprobs", num_top, "sent together with logprobs=true")
    return num_top if has_logprobs else None
