"""`/v1/chat/completions`: `ChatRequest` is the body of a request, `ChatBody` writes the answer.

Each of OpenAI's parameters is honoured, or refused by name when its value asks for something; none is silently dropped.
`max_tokens` beyond the room left in the context is reduced to it, where OpenAI would refuse.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Discriminator, Field, PlainValidator, Tag, model_validator

from areal_agent.gateway.answers import Answer, Choice, chat_logprobs, completion_ids
from areal_agent.gateway.bodies import Body, Name, PositiveCount, ShallowObject, Unsupported, json_kind, refuse
from areal_agent.gateway.conversation import PASSED_ON, Conversation, Message, TemplateOptions, template_options
from areal_agent.gateway.draft import Gain, Piece, TokenRow
from areal_agent.gateway.order import DEFAULT_MODEL, MAX_TOP_LOGPROBS, Order, OrderBody
from areal_agent.gateway.server import DONE, error_object
from areal_agent.gateway.tools import NO_TOOLS, NamedTool, Tool, ToolChoice, Tools, ToolUse, read_tools
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.formats.base import AnswerDelta, answer_message, call_form, call_id
from areal_agent.tokens.renderer import Detokenizer
from areal_agent.types import JsonObject

ANY_OBJECT = '{"type":"object"}'


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


class AllowedTools(Body):
    """The tools that may be called. The others stay in the prompt."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Messages = Annotated[
    list[JsonObject],
    PlainValidator(_read_messages, json_schema_input_type=Annotated[list[Message], Field(min_length=1)]),
]
ToolList = Annotated[Tools, PlainValidator(read_tools, json_schema_input_type=list[Tool])]


class ChatRequest(OrderBody):
    """The body of a chat completion request."""

    # Kept as the agent wrote them; new ones are checked when the conversation is placed.
    messages: Messages
    tools: ToolList = NO_TOOLS
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("a string")]
        | Annotated[NamedTool | AllowedChoice, Field(discriminator="type"), Tag("an object")],
        Discriminator(json_kind),
    ] = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = Field(
        default=None, description="Anything but `text` needs an engine with grammars; it is refused elsewhere."
    )
    max_completion_tokens: PositiveCount | None = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict[str, Any])
    reasoning_effort: Name | None = Field(default=None, description=PASSED_ON)
    verbosity: Name | None = Field(default=None, description=PASSED_ON)
    continues_last: bool = Field(
        default=False,
        alias="continue_final_message",
        description="An extension: the answer goes on where the last message, an assistant's, ends.",
    )
    add_generation_prompt: bool = Field(
        default=True, description="False is accepted only together with continue_final_message, as in vLLM."
    )
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    audio: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    moderation: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    store: Annotated[Any, Unsupported(False)] = None
    web_search_options: Annotated[Any, Unsupported()] = None

    # ------------------------------------------------------------------------------------- what must agree

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", self.top_logprobs, "sent together with logprobs=true")
        self.choice.require_known(self.tools.definitions, self._choice_param)
        if self.json_schema is not None:
            self.conversation.require_no_calls("response_format")
        self._check_continued()
        return self._with_one_limit()

    @property
    def _choice_param(self) -> str:
        return "tool_choice.function.name" if isinstance(self.tool_choice, NamedTool) else "tool_choice"

    def _check_continued(self) -> None:
        if not self.add_generation_prompt and not self.continues_last:
            refuse("add_generation_prompt", False, "true, unless continue_final_message is true")
        if self.continues_last and self.choice.use is ToolUse.REQUIRED:
            refuse("continue_final_message", True, "false where tool_choice demands a call")

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
    def choice(self) -> ToolChoice:
        match self.tool_choice:
            case NamedTool(function=function):
                return ToolChoice(use=ToolUse.REQUIRED, only=function.name)
            case AllowedChoice(allowed_tools=allowed):
                return ToolChoice(use=ToolUse(allowed.mode), allowed={one.function.name for one in allowed.tools})
            case use:
                return _CHOICES[ToolUse(use)]

    @property
    def conversation(self) -> Conversation:
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            choice=self.choice,
            template_options=template_options(self.chat_template_kwargs, self.reasoning_effort, self.verbosity),
            continues_last=self.continues_last,
        )

    def order(self) -> Order:
        conversation = self.conversation
        return Order(
            id_prefix="chatcmpl-",
            model=self.model,
            prompt_param="messages",
            questions=(conversation,),
            is_streamed=self.is_streamed,
            wishes=self,
            num_choices=self.num_choices,
            stops=self.stops,
            seed=self.seed,
            num_top_logprobs=self.num_top_logprobs,
            json_schema=self.json_schema,
            is_single_call=conversation.is_single_call(self.parallel_tool_calls),
        )


_CHOICES = {use: ToolChoice(use=use) for use in ToolUse}


class TokenizeRequest(Body):
    """What to tokenise, as for vLLM: a plain prompt, or messages as a chat would send them."""

    model: str = DEFAULT_MODEL
    prompt: str | None = None
    messages: Messages | None = None
    tools: ToolList = NO_TOOLS
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict[str, Any])
    add_generation_prompt: Annotated[Any, Unsupported(True)] = None
    add_special_tokens: Annotated[Any, Unsupported(True)] = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", self.prompt, "given, or messages, and not both")
        return self

    @property
    def conversation(self) -> Conversation:
        return Conversation(messages=self.messages or [], tools=self.tools, template_options=self.chat_template_kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenized:
    """The answer of `/v1/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class ChatBody:
    """Writes the answer to one exchange as a `chat.completion` object or the chunks of a stream."""

    names_events = False
    done = DONE
    fault = staticmethod(error_object)

    def __init__(self, request: ChatRequest, exchange: Exchange, detokenizer: Detokenizer) -> None:
        self._request = request
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
        if self._request.has_token_ids:
            body["prompt_token_ids"] = list(answer.turns[0].prompt_ids)
        return body

    def _choice(self, choice: Choice) -> JsonObject:
        body: dict[str, Any] = {
            "index": choice.index,
            "message": answer_message(choice.parsed, choice.content, choice.completion.id),
            "logprobs": self._logprobs(choice.rows),
            "finish_reason": choice.finish_reason,
        }
        if self._request.has_token_ids:
            body["token_ids"] = choice.completion.token_ids
        return body

    # --------------------------------------------------------------------------------------- in chunks

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        """Yield the chunks with the role, before any text."""
        for index in range(len(self._completion_ids)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""})
            if self._request.has_token_ids and index == 0:
                chunk["prompt_token_ids"] = list(prompt_ids)
            yield chunk

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield a chunk for each delta of one answer; the first carries the tokens."""
        for number, delta in enumerate(piece.gain.deltas):
            body = _delta(delta, self._completion_ids[piece.index])
            yield self._chunk(piece.index, body, piece.gain if number == 0 else None)
        if not piece.gain.deltas and self._tells_tokens(piece.gain):
            yield self._chunk(piece.index, {}, piece.gain)

    def idle(self) -> JsonObject:
        """Return a chunk with an empty delta."""
        return self._chunk(0, {})

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """Yield the finish reasons, and the usage if asked for, once everything is recorded."""
        for choice in answer.choices:
            chunk = self._chunk(choice.index, {})
            chunk["choices"][0]["finish_reason"] = choice.finish_reason
            yield chunk
        if self._request.has_usage_chunk:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": answer.usage()}

    def _chunk(self, index: int, delta: JsonObject, gain: Gain | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if gain is not None:
            choice["logprobs"] = self._logprobs(gain.rows)
            if self._request.has_token_ids:
                choice["token_ids"] = gain.token_ids
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._request.has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _tells_tokens(self, gain: Gain) -> bool:
        has_logprobs = self._request.num_top_logprobs is not None and bool(gain.rows)
        return has_logprobs or (self._request.has_token_ids and bool(gain.token_ids))

    def _logprobs(self, rows: tuple[TokenRow, ...]) -> JsonObject | None:
        num_top = self._request.num_top_logprobs
        return None if num_top is None else chat_logprobs(rows, num_top, self._detokenizer)


def _delta(delta: AnswerDelta, completion_id: str) -> JsonObject:
    body: dict[str, Any] = {}
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.content:
        body["content"] = delta.content
    if delta.call is not None:
        call = call_form(delta.call, call_id(completion_id, delta.call_index))
        body["tool_calls"] = [{"index": delta.call_index, **call}]
    return body
