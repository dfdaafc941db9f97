"""`/v1/chat/completions`: `ChatRequest` is the body of a request, `ChatBody` writes the answer.

Each of OpenAI's parameters is honoured, or refused by name when its value asks for something; none is silently dropped.
`max_tokens` beyond the room left in the context is reduced to it, where OpenAI would refuse.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import Discriminator, Field, PlainValidator, Tag, model_validator

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Answer, Choice, call_id, chat_logprobs, completion_ids
from areal_agent.gateway.bodies import Body, Name, PositiveCount, ShallowObject, Unsupported, json_kind, refuse
from areal_agent.gateway.conversation import Message, NamedTool, Tool, Tools, read_message, read_tools
from areal_agent.gateway.draft import ChatReading, Gain, Piece, TokenRow
from areal_agent.gateway.order import MAX_TOP_LOGPROBS, Order, Question
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.forest import Forest, Opening, Prompt
from areal_agent.tokens.formats.base import AnswerDelta, ToolCall
from areal_agent.tokens.formats.reader import THINK_END
from areal_agent.tokens.renderer import Detokenizer, Renderer
from areal_agent.types import JsonObject

ANY_OBJECT = '{"type":"object"}'


class ToolUse(StrEnum):
    """The use that the model may make of the tools."""

    AUTO = "auto"  # the model decides
    NONE = "none"  # text that looks like a call is text
    REQUIRED = "required"  # the answer begins with a call


class PlainFormat(Body):
    """Plain text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Body):
    """A JSON schema. Answers always match it, with or without `strict`."""

    name: Name
    definition: ShallowObject = Field(alias="schema")
    description: Any = None
    strict: bool = False


class SchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


def _read_messages(value: object) -> list[JsonObject]:
    if not isinstance(value, list) or not value:
        refuse("messages", value, "a list of at least one message")
    return value


class ChatRequest(Order):
    """The body of a chat completion request."""

    id_prefix: ClassVar[str] = "chatcmpl"
    prompt_param: ClassVar[str] = "messages"

    # Kept as the agent wrote them; new ones are checked when the conversation is placed.
    messages: Annotated[
        list[JsonObject],
        PlainValidator(_read_messages, json_schema_input_type=Annotated[list[Message], Field(min_length=1)]),
    ]
    tools: Annotated[Tools, PlainValidator(read_tools, json_schema_input_type=list[Tool])] = Tools(
        definitions=(), accepts=None
    )
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("a string")] | Annotated[NamedTool, Tag("an object")],
        Discriminator(json_kind),
    ] = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = Field(
        default=None, description="Anything but `text` needs an engine with grammars; it is refused elsewhere."
    )
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    audio: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    moderation: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    store: Annotated[Any, Unsupported(False)] = None
    verbosity: Annotated[Any, Unsupported("medium")] = None
    web_search_options: Annotated[Any, Unsupported()] = None

    # ------------------------------------------------------------------------------------- what must agree

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", self.top_logprobs, "sent together with logprobs=true")
        self._check_tool_choice()
        if self.json_schema is not None and self.tools.definitions and self.may_call_tools:
            raise RequestError(
                "response_format makes the whole answer JSON, so it could not call a tool; send it without tools, or "
                "with tool_choice 'none'",
                param="response_format",
                code="unsupported_parameter",
            )
        return self._with_one_limit()

    def _check_tool_choice(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools.definitions]
        if self.only_tool is not None and self.only_tool not in names:
            must = f"one of the tools: {', '.join(names) or 'there are none'}"
            refuse("tool_choice.function.name", self.only_tool, must)
        if self.tool_choice == ToolUse.REQUIRED and not names:
            refuse("tool_choice", self.tool_choice, "'none' or left out where there are no tools")

    def _with_one_limit(self) -> Self:
        """Accept `max_completion_tokens`, the newer name of `max_tokens`."""
        newer = self.max_completion_tokens
        if newer is None or newer == self.max_tokens:
            return self
        if self.max_tokens is not None:
            refuse("max_tokens", self.max_tokens, f"max_completion_tokens ({newer})")
        return self.model_copy(update={"max_tokens": newer})

    # --------------------------------------------------------------------------------------- what it means

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def json_schema(self) -> str | None:
        if isinstance(self.response_format, SchemaFormat):
            return orjson.dumps(self.response_format.json_schema.definition).decode()
        return ANY_OBJECT if self.response_format and self.response_format.type == "json_object" else None

    @property
    def tool_use(self) -> ToolUse:
        if isinstance(self.tool_choice, NamedTool):
            return ToolUse.REQUIRED
        return ToolUse(self.tool_choice) if self.tools.definitions else ToolUse.NONE

    @property
    def may_call_tools(self) -> bool:
        return self.tool_use is not ToolUse.NONE

    @property
    def only_tool(self) -> str | None:
        """The one tool that must be called, exactly once."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def is_single_call(self) -> bool:
        return self.only_tool is not None or (not self.parallel_tool_calls and self.may_call_tools)

    def questions(self) -> tuple[Question]:
        return (self,)

    def place(self, forest: Forest, renderer: Renderer) -> Prompt:
        return forest.plan(
            self.messages, self.tools.definitions, normalise=read_message, opening=self._opening(renderer)
        )

    def reading(self, renderer: Renderer, prompt: Prompt) -> ChatReading:
        return ChatReading(
            answer_format=renderer.answer_format,
            may_call_tools=self.may_call_tools,
            is_thinking=prompt.is_thinking or THINK_END in prompt.opening,
            opening=prompt.opening,
            only_tool=self.only_tool,
            accepts=self.tools.accepts,
        )

    def _opening(self, renderer: Renderer) -> Opening | None:
        if self.tool_use is not ToolUse.REQUIRED:
            return None
        return partial(renderer.answer_format.opening, self.only_tool)


class ChatBody:
    """Writes the answer to one exchange as a `chat.completion` object or the chunks of a stream."""

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
        """Yield the chunks with the role, before any text."""
        for index in range(len(self._completion_ids)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self._order.has_token_ids and index == 0:
                chunk["prompt_token_ids"] = list(prompt_ids)
            yield chunk

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield a chunk for each delta of one answer; the first carries the tokens."""
        for number, delta in enumerate(piece.gain.deltas):
            body = _delta(delta, self._completion_ids[piece.index])
            yield self._chunk(piece.index, body, piece.gain if number == 0 else None)
        if not piece.gain.deltas and self._tells_tokens(piece.gain):
            yield self._chunk(piece.index, {}, piece.gain)

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """Yield the finish reasons, and the usage if asked for, once everything is recorded."""
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
