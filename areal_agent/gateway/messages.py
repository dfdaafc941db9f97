"""`/v1/messages`: `MessagesRequest` is the body of a request, `MessagesBody` writes the answer.

Anthropic's messages are blocks; they become messages as chat completions write them::

    system, or a block of it          a system message, the first
    user: text, image, tool_result    user and tool messages, in this order
    assistant: thinking, text,        one message with reasoning_content, content and tool_calls
               tool_use

Each of Anthropic's parameters is honoured, or refused by name when its value asks for something. Caching is the
engine's affair: `cache_control` is accepted and ignored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, Self, cast

import orjson
from pydantic import Discriminator, Field, PlainValidator, Tag, TypeAdapter, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from areal_agent.errors import RequestError
from areal_agent.gateway.answers import Answer, Choice
from areal_agent.gateway.bodies import (
    Body,
    Count,
    Harmless,
    Name,
    Number,
    Open,
    PositiveCount,
    ShallowObject,
    Unsupported,
    read_as,
    refuse,
)
from areal_agent.gateway.conversation import (
    Content,
    Conversation,
    ImagePart,
    TextOr,
    TextPart,
    Translated,
    content_of,
    kind_of_part,
    template_options,
    text_of,
)
from areal_agent.gateway.draft import Piece
from areal_agent.gateway.images import schema_of
from areal_agent.gateway.order import MAX_STOPS, Order, SamplingWishes
from areal_agent.gateway.server import anthropic_error
from areal_agent.gateway.tools import (
    NO_TOOLS,
    ToolChoice,
    ToolName,
    Tools,
    ToolUse,
    reader_of_tools,
    strict_tools,
    without_nulls,
)
from areal_agent.gateway.turn import Exchange
from areal_agent.tokens.canonical import format_json
from areal_agent.tokens.formats.base import call_id
from areal_agent.types import JsonObject

NOT_FOR_THE_MODEL = "x-anthropic-billing-header:"
"""How Claude Code's first block of `system` begins. It is different in each request, and Anthropic removes it."""

# ------------------------------------------------------------------------------------------------------ messages


class ThinkingBlock(Open):
    """Reasoning of an earlier answer. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Open):
    """Reasoning that cannot be read; ignored."""

    type: Literal["redacted_thinking"]


class CallBlock(Open):
    """A tool call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: ShallowObject

    def as_chat(self) -> JsonObject:
        function = {"name": self.name, "arguments": format_json(self.input)}
        return {"id": self.id, "type": "function", "function": function}


class ReferencePart(Open):
    """A tool that a search of the client's has found: from now on the client sends its definition with the others."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} is there now."


Image = Annotated[ImagePart, schema_of("image"), Tag("an image")]

ResultPart = Annotated[
    Image | Annotated[Annotated[TextPart | ReferencePart, Field(discriminator="type")], Tag("a text")],
    Discriminator(kind_of_part),
]


class ResultBlock(Open):
    """The result of a tool call. Chat templates are not told of errors: `is_error` is only recorded."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[ResultPart] = ""
    is_error: bool = False

    def as_chat(self) -> JsonObject:
        message = {"role": "tool", "tool_call_id": self.tool_use_id, "content": content_of(self.content)}
        return message | {"is_error": True} if self.is_error else message


UserBlock = Annotated[
    Image | Annotated[Annotated[TextPart | ResultBlock, Field(discriminator="type")], Tag("a text")],
    Discriminator(kind_of_part),
]
AnswerBlock = Annotated[TextPart | ThinkingBlock | RedactedBlock | CallBlock, Field(discriminator="type")]


class AnyMessage(Body):
    """What messages of every role may have."""

    output_config: Harmless = None  # Claude Code repeats that of its request


class UserMessage(AnyMessage):
    """What the user says and the results of tools."""

    role: Literal["user"]
    content: TextOr[UserBlock]

    def as_chat(self) -> list[JsonObject]:
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        messages: list[JsonObject] = []
        for _, group in groupby(self.content, lambda block: isinstance(block, ResultBlock)):
            blocks = list(group)
            said = [block for block in blocks if not isinstance(block, ResultBlock)]
            results = [block.as_chat() for block in blocks if isinstance(block, ResultBlock)]
            messages += results or [{"role": "user", "content": content_of(said)}]
        return messages or [{"role": "user", "content": ""}]


class SystemMessage(AnyMessage):
    """More instructions in the middle of a conversation."""

    role: Literal["system"]
    content: Content

    def as_chat(self) -> list[JsonObject]:
        return [{"role": "system", "content": text_of(self.content)}]


class EarlierAnswer(AnyMessage):
    """An answer of the assistant, sampled or written by the client."""

    role: Literal["assistant"]
    content: TextOr[AnswerBlock]

    def as_chat(self) -> list[JsonObject]:
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        text = text_of([block for block in self.content if isinstance(block, TextPart)], "")
        thinking = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        calls = [block.as_chat() for block in self.content if isinstance(block, CallBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls
        return [message]


Message = Annotated[UserMessage | EarlierAnswer | SystemMessage, Field(discriminator="role")]
MESSAGE: TypeAdapter[UserMessage | EarlierAnswer | SystemMessage] = TypeAdapter(Message)


def _as_chat(items: list[Any], index: int) -> list[JsonObject]:
    """Check a message and translate it. Raises RequestError naming the place."""
    return read_as(MESSAGE, items[0], f"messages[{index}]").as_chat()


# --------------------------------------------------------------------------------------------------------- tools


class CustomTool(Open):
    """A tool that the model may call. With `strict`, a call whose input does not match the schema is malformed."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    allowed_callers: Annotated[Any, Unsupported(["direct"])] = None
    defer_loading: Harmless = None  # nothing here loads definitions later, so all are in the prompt
    input_examples: Harmless = None

    @model_validator(mode="before")
    @classmethod
    def _require_custom(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("type") not in (None, "custom"):
            raise PydanticCustomError(
                "unsupported_content",
                "has type {type}: this gateway runs no tools; send tools of your own, with 'name' and 'input_schema'",
                {"type": f"{value.get('type')!r:.80}"},
            )
        return value

    def as_chat(self) -> JsonObject:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict or None,
        }
        return {"type": "function", "function": without_nulls(function)}


TOOLS = TypeAdapter(list[CustomTool])


@reader_of_tools
def _read_tools(text: bytes) -> Tools:
    definitions = [tool.as_chat() for tool in read_as(TOOLS, orjson.loads(text), "tools")]
    schemas = [f"tools[{index}].input_schema" for index in range(len(definitions))]
    return Tools(definitions=definitions, accepts=strict_tools(definitions, schemas))


class AnyChoice(Body):
    """The model decides (`auto`), must call a tool (`any`), or must not (`none`)."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedChoice(Body):
    """The one tool that must be called."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


_USES = {"auto": ToolUse.AUTO, "any": ToolUse.REQUIRED, "none": ToolUse.NONE}


# ------------------------------------------------------------------------------------------------------- request


class Thinking(Body):
    """Whether the model thinks first. The template's `enable_thinking` says so; the budget does not limit it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: PositiveCount | None = None
    display: Literal["summarized", "omitted"] = Field(
        default="summarized", description="`omitted`: thinking is answered as blocks without text."
    )


class OutputFormat(Body):
    """JSON that matches a schema. It needs an engine with grammars and is refused elsewhere."""

    type: Literal["json_schema"]
    definition: ShallowObject = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer."""

    effort: Name | None = Field(default=None, description="Passed to the chat template as `reasoning_effort`.")
    format: OutputFormat | None = None


def _read_messages(value: object, info: ValidationInfo) -> list[JsonObject]:
    if not isinstance(value, list) or not value:
        refuse("messages", value, "a list of at least one message")
    translated = info.context if isinstance(info.context, Translated) else Translated()
    return translated.messages(cast("list[Any]", value), _as_chat, one_by_one=True)


KEEPS_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}


class CountRequest(Body):
    """The body of a request to count the tokens of a prompt. It may be that of a messages request."""

    model: str
    # As chat completions write them. `read` translates only those that its context, a `Translated`, does not know.
    messages: Annotated[
        list[JsonObject],
        PlainValidator(_read_messages, json_schema_input_type=Annotated[list[Message], Field(min_length=1)]),
    ]
    system: Content = ""
    tools: Annotated[Tools, PlainValidator(_read_tools, json_schema_input_type=list[CustomTool])] = NO_TOOLS
    tool_choice: Annotated[AnyChoice | NamedChoice, Field(discriminator="type")] = AnyChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = Field(default=None, description="The older name of `output_config.format`.")
    max_tokens: PositiveCount | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[Name], Field(max_length=MAX_STOPS)] = Field(default_factory=list[Name])
    is_streamed: bool = Field(default=False, alias="stream")

    cache_control: Harmless = None
    container: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Unsupported({}, {"edits": []}, {"edits": [KEEPS_ALL_THINKING]})] = None
    diagnostics: Harmless = None
    fallbacks: Annotated[Any, Unsupported([])] = None
    inference_geo: Harmless = None
    mcp_servers: Annotated[Any, Unsupported([])] = None
    metadata: Harmless = None
    service_tier: Annotated[Any, Unsupported("auto", "standard_only")] = None
    speed: Annotated[Any, Unsupported("standard")] = None
    user_profile_id: Harmless = None
    workspace_id: Harmless = None

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        param = "tool_choice.name" if isinstance(self.tool_choice, NamedChoice) else "tool_choice"
        self.choice.require_known(self.tools.definitions, param)
        return self

    @property
    def conversation(self) -> Conversation:
        system, thinking = self._system, self.thinking
        thinks = {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}
        return Conversation(
            messages=[{"role": "system", "content": system}, *self.messages] if system else self.messages,
            tools=self.tools,
            choice=self.choice,
            template_options=template_options(thinks, self.output_config.effort, None),
            continues_last=self.continues_last,
            last_param="messages[-1]",
        )

    @property
    def continues_last(self) -> bool:
        last = self.messages[-1]  # a whole answer, with thinking or calls, can be counted but not continued
        return last["role"] == "assistant" and not (last.get("reasoning_content") or last.get("tool_calls"))

    @property
    def choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedChoice):
            return ToolChoice(use=ToolUse.REQUIRED, only=self.tool_choice.name)
        return ToolChoice(use=_USES[self.tool_choice.type])

    @property
    def _system(self) -> str:
        if isinstance(self.system, str):
            return self.system
        return text_of([part for part in self.system if not part.text.startswith(NOT_FOR_THE_MODEL)])


class MessagesRequest(CountRequest):
    """The body of a messages request."""

    max_tokens: Annotated[PositiveCount, Field(description="Reduced to the room left in the context.")]  # type: ignore

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.continues_last and self.choice.use is ToolUse.REQUIRED:
            refuse("tool_choice", self.tool_choice.type, "'auto' or 'none' where the last message is an assistant's")
        if self._format:
            self.conversation.require_no_calls(self._format_param)
        return self

    @property
    def continues_last(self) -> bool:
        return self.messages[-1]["role"] == "assistant"

    @property
    def _format(self) -> OutputFormat | None:
        return self.output_config.format or self.output_format

    @property
    def _format_param(self) -> str:
        return "output_format" if self.output_config.format is None else "output_config.format"

    def order(self) -> Order:
        conversation = self.conversation
        return Order(
            id_prefix="msg_",
            model=self.model,
            prompt_param="messages",
            questions=(conversation,),
            is_streamed=self.is_streamed,
            wishes=SamplingWishes(
                temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens
            ),
            stops=tuple(self.stop_sequences),
            json_schema=orjson.dumps(self._format.definition).decode() if self._format else None,
            schema_param=self._format_param,
            is_single_call=conversation.is_single_call(not self.tool_choice.disable_parallel_tool_use),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCount:
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: Number


# -------------------------------------------------------------------------------------------------------- answer


class MessagesBody:
    """Writes the answer to one exchange as a `message` object or the events of a stream.

    Thinking and text are streamed as they come. Calls are streamed last, so that the blocks of a stream are those of
    the whole answer.
    """

    names_events = True
    done = b""

    def __init__(self, request: MessagesRequest, exchange: Exchange) -> None:
        self._head = {"id": exchange.answer_id, "type": "message", "role": "assistant", "model": exchange.model}
        self._shows_thinking = request.thinking is None or request.thinking.display != "omitted"
        self._signature = exchange.answer_id  # clients want one that is not empty; nothing reads it
        self._num_blocks = 0
        self._open = ""  # the type of the block that is being streamed

    def whole(self, answer: Answer) -> JsonObject:
        (choice,) = answer.choices
        content: list[JsonObject] = []
        if thinking := choice.parsed.reasoning:
            shown = thinking if self._shows_thinking else ""
            content.append({"type": "thinking", "thinking": shown, "signature": self._signature})
        if choice.content:
            content.append({"type": "text", "text": choice.content})
        for index, call in enumerate(choice.parsed.tool_calls):
            arguments = orjson.Fragment(call.arguments_json)  # orjson itself would refuse large integers
            content.append(_call(choice, index, arguments))
        return {**self._head, "content": content, **_end(choice), "usage": _usage(answer)}

    def first(self, prompt_ids: Sequence[int]) -> Iterator[JsonObject]:
        """Yield the event that begins the message. Which tokens are cached is told at the end."""
        end = {"stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": len(prompt_ids), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head, "content": [], **end, "usage": usage}}

    def piece(self, piece: Piece) -> Iterator[JsonObject]:
        """Yield the events for new thinking and text."""
        for delta in piece.gain.deltas:
            if delta.reasoning:
                yield from self._in_block({"type": "thinking", "thinking": "", "signature": ""})
                if self._shows_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
            if delta.content:
                yield from self._in_block({"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": delta.content})

    def idle(self) -> JsonObject:
        return {"type": "ping"}

    def last(self, answer: Answer) -> Iterator[JsonObject]:
        """Yield the calls, the reason for the end and the usage, once everything is recorded."""
        (choice,) = answer.choices
        for index, call in enumerate(choice.parsed.tool_calls):
            yield from self._close()
            yield from self._in_block(_call(choice, index, {}))
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments_json})
        yield from self._close()
        yield {"type": "message_delta", "delta": _end(choice), "usage": _usage(answer)}
        yield {"type": "message_stop"}

    def fault(self, fault: RequestError) -> JsonObject:
        return anthropic_error(fault)

    def _in_block(self, block: JsonObject) -> Iterator[JsonObject]:
        """Begin this block, unless one of its type is open."""
        if self._open != block["type"]:
            yield from self._close()
            self._open = block["type"]
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _close(self) -> Iterator[JsonObject]:
        """End the open block, if any."""
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        if self._open:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._open = ""
            self._num_blocks += 1

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}


def _call(choice: Choice, index: int, arguments: object) -> JsonObject:
    call = choice.parsed.tool_calls[index]
    return {
        "type": "tool_use",
        "id": call_id(choice.completion.id, index),
        "name": call.name,
        "input": arguments,
    }


def _end(choice: Choice) -> JsonObject:
    if choice.finish_reason == "stop" and choice.stop_text:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_text}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None}


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _usage(answer: Answer) -> JsonObject:
    """Return Anthropic's `usage`, in which tokens read from a cache are no `input_tokens`."""
    (turn,) = answer.turns
    (choice,) = turn.choices
    usage: dict[str, Any] = {
        "input_tokens": len(turn.prompt_ids) - turn.num_cached_tokens,
        "cache_read_input_tokens": turn.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(choice.completion.token_ids),
    }
    if choice.num_reasoning_tokens:
        usage["output_tokens_details"] = {"thinking_tokens": choice.num_reasoning_tokens}
    return usage
