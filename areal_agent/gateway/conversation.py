"""A conversation as every protocol asks to continue it: messages, and tools (`tools.py`) that the answer may use.

Each protocol checks its own form and translates it into messages as chat completions write them (`Translated` does so
for new ones only). `Conversation` places them among the session's turns; nothing else in the gateway's protocols knows
of that. So an episode gives the same tokens through every protocol.

Messages are checked and normalised for the chat template and for comparison. A normalised message has its content as
one string (with images: a list of them and of the texts between them), the arguments of tool calls as parsed objects,
and no key without a value.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from itertools import groupby, takewhile
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, cast, get_args

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import (
    Body,
    Open,
    ShallowObject,
    json_kind,
    read_as,
    require_shallow,
    wrong,
)
from areal_agent.gateway.draft import ChatReading
from areal_agent.gateway.images import schema_of
from areal_agent.gateway.tools import NO_TOOLS, ToolChoice, Tools, ToolUse
from areal_agent.images import PREFIX
from areal_agent.tokens.canonical import parse_json_object
from areal_agent.tokens.forest import Forest, Prompt
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.shield import Shielded
from areal_agent.types import JsonObject, record

T = TypeVar("T")


class TextPart(Open):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str
    thought: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _require_text(cls, value: object) -> object:
        kinds = get_args(cls.model_fields["type"].annotation)
        if isinstance(value, dict) and value.get("type") not in kinds:
            raise PydanticCustomError(
                "unsupported_content",
                "has type {type}: the model takes text, no images (unless it sees), no audio and no files; "
                "send {'type': '{kind}', 'text': ...}",
                {"type": f"{value.get('type')!r:.80}", "kind": kinds[0]},
            )
        return value


class ImageUrl(Open):
    """The reference to an image."""

    url: str


class ImagePart(Open):
    """An image in any protocol, as `ImageIntake` has left it; what clients send has no size.

    A part that still has none is of a gateway whose model takes text only.
    """

    type: Literal["image_url"]
    image_url: ImageUrl
    width: int  # in pixels
    height: int

    @property
    def text(self) -> str:
        return ""

    def as_template(self) -> JsonObject:
        """Return it as chat templates take it."""
        digest = self.image_url.url.removeprefix(PREFIX)
        return {"type": "image", "digest": digest, "width": self.width, "height": self.height}


def kind_of_part(value: object) -> str:
    """Select the member of a union of parts: "an image" that `ImageIntake` has left, or "a text" or what else it is."""
    is_image = isinstance(value, dict) and value.get("type") == "image_url" and "width" in value
    return "an image" if is_image else "a text"


class RefusalPart(Open):
    """A refusal, which is what the answer says."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")
    thought: ClassVar[str] = ""


class ThoughtPart(Open):
    """Reasoning among the parts of an answer's content."""

    type: Literal["reasoning", "thinking", "redacted_thinking"]
    reasoning: str = ""
    thinking: str = ""
    text: ClassVar[str] = ""

    @property
    def thought(self) -> str:
        return self.reasoning or self.thinking


AnswerPart = Annotated[TextPart | RefusalPart | ThoughtPart, Field(discriminator="type")]

TextOr = Annotated[Annotated[str, Tag("a string")] | Annotated[list[T], Tag("a list")], Discriminator(json_kind)]
"""A text, or a list of parts."""

Content = TextOr[TextPart]

SeenPart = Annotated[
    Annotated[ImagePart, schema_of("image_url"), Tag("an image")] | Annotated[TextPart, Tag("a text")],
    Discriminator(kind_of_part),
]

SeenContent = TextOr[SeenPart]

AnswerContent = TextOr[AnswerPart]

Ignored = Annotated[Any, BeforeValidator(require_shallow), Field(description="Added by client libraries; ignored.")]


class HasText(Protocol):
    """A part of a message's content."""

    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[HasText], between: str = "\n") -> str:
    """Return the text of a message. The parts of a prompt's begin lines of their own; an answer's have "" `between`."""
    return content if isinstance(content, str) else between.join(part.text for part in content)


def content_of(content: str | Sequence[HasText], between: str = "\n") -> str | list[JsonObject]:
    """Return a message's content as chat completions write it: one text, or its parts if it has images."""
    if isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
        return text_of(content, between)
    return [
        part.model_dump() if isinstance(part, ImagePart) else {"type": "text", "text": part.text} for part in content
    ]


def read_arguments(value: object) -> dict[str, Any]:
    """Read the arguments of a call that a client sends back, as text or as they are; no text means none."""
    if isinstance(value, str):
        value = parse_json_object(value) if value.strip() else {}
    if not isinstance(value, dict):
        raise wrong("a JSON object, or the text of one")
    return cast("dict[str, Any]", value)


class FunctionCall(Body):
    """The tool of a call and its arguments."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: Annotated[
        dict[str, Any], BeforeValidator(read_arguments, json_schema_input_type=str | dict[str, Any])
    ] = Field(default_factory=dict[str, Any], description="A JSON object, as text or as it is.")

    def normalised(self) -> JsonObject:
        return {"name": self.name, "arguments": self.arguments}


class EchoedToolCall(Body):
    """A tool call in an earlier answer that the client sends back."""

    model_config = ConfigDict(extra="ignore")  # the depth is that of its message

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def normalised(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": self.function.normalised()}


READ = frozenset({"role", "name", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"})
"""The fields of messages that may come into the prompt. Client libraries add others, which do not."""


def num_ignored_fields(messages: Iterable[JsonObject]) -> int:
    """Return how many fields of checked messages were ignored although they were not empty."""
    return sum(
        bool(message[name]) for message in messages if not message.keys() <= READ for name in message.keys() - READ
    )


class AnyMessage(Body):
    """Fields of messages of every role. Unknown fields are ignored if they are empty, or if they are listed here."""

    ignores_empty: ClassVar[bool] = True

    name: str | None = None
    id: Ignored = None
    annotations: Ignored = None
    cache_control: Ignored = None
    metadata: Ignored = None
    provider_specific_fields: Ignored = None

    def _normalised(self, role: str, content: str | Sequence[TextPart | ImagePart], **others: object) -> JsonObject:
        fields = {"role": role, "content": _normalised_content(content), "name": self.name, **others}
        return {name: value for name, value in fields.items() if value is not None}


def _normalised_content(content: str | Sequence[TextPart | ImagePart]) -> str | list[JsonObject]:
    """Return one text or, if there are images, a list of them and of the texts between them."""
    if isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
        return text_of(content)
    parts: list[JsonObject] = []
    for _, group in groupby(content, lambda part: isinstance(part, ImagePart)):
        run = list(group)
        images = [part.as_template() for part in run if isinstance(part, ImagePart)]
        parts += images or [{"type": "text", "text": text_of(run)}]
    return parts


class InstructionMessage(AnyMessage):
    """A message of the system. Chat templates get `developer` as `system`."""

    role: Literal["system", "developer"]
    content: Content

    def normalised(self) -> JsonObject:
        return self._normalised("system", self.content)


class QuestionMessage(AnyMessage):
    """A message of the user."""

    role: Literal["user"]
    content: SeenContent

    def normalised(self) -> JsonObject:
        return self._normalised(self.role, self.content)


class AssistantMessage(AnyMessage, Open):
    """An answer of the assistant, sampled or written by the client.

    Libraries echo an answer with fields of their own, so any other field is ignored.
    """

    role: Literal["assistant"]
    content: AnswerContent = ""
    reasoning_content: str | None = None
    reasoning: Any = Field(default=None, description="A text is another name of `reasoning_content`.")
    tool_calls: list[EchoedToolCall] = Field(default_factory=list[EchoedToolCall])
    function_call: Any = Field(default=None, description="Ignored beside `tool_calls`, refused without them.")

    @field_validator("function_call")
    @classmethod
    def _require_tool_calls(cls, value: object, info: ValidationInfo) -> object:
        if value and not info.data.get("tool_calls"):
            raise PydanticCustomError(
                "unsupported_content", "is the older form of a call; send the call in tool_calls, with an id"
            )
        return value

    def normalised(self) -> JsonObject:
        said, thought = self.content, self.reasoning_content
        if not thought and isinstance(self.reasoning, str):
            thought = self.reasoning
        if not isinstance(said, str):
            thought = thought or "".join(part.thought for part in said) or None
            said = "".join(part.text for part in said)
        calls = [call.normalised() for call in self.tool_calls]
        return self._normalised(self.role, said, reasoning_content=thought, tool_calls=calls or None)


class ToolMessage(AnyMessage):
    """The result of a tool call."""

    role: Literal["tool"]
    content: SeenContent
    tool_call_id: str | None = None
    is_error: Ignored = None
    status: Ignored = None
    artifact: Ignored = None

    def normalised(self) -> JsonObject:
        return self._normalised(self.role, self.content, tool_call_id=self.tool_call_id)


Message = Annotated[InstructionMessage | QuestionMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]

MESSAGE: TypeAdapter[InstructionMessage | QuestionMessage | AssistantMessage | ToolMessage] = TypeAdapter(Message)


def read_message(value: object, index: int) -> JsonObject:
    """Check and normalise the message `messages[index]`; raises RequestError naming the place."""
    return read_as(MESSAGE, value, f"messages[{index}]").normalised()


# -------------------------------------------------------------------------------------------------- conversation


UNREADABLE_CALLS = (
    "the model's chat template writes no tool call that can be read back, so calls in answers would stay text: serve "
    "the model with a template that writes calls in a format of docs/gateway.md, or name the format (--tool-format, "
    "rollout.tool_format; 'none' leaves them text), or leave out tools"
)

PASSED_ON = "Passed to the chat template under this name; a template that does not read it ignores it."

RESERVED_OPTIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "additional_special_tokens"})


def _require_free(options: JsonObject) -> JsonObject:
    reserved = sorted(name for name in options if name in RESERVED_OPTIONS or name.endswith("_token"))
    if reserved:
        raise wrong(f"an object without {', '.join(reserved)}, which the gateway gives to the template")
    return options


TemplateOptions = Annotated[
    ShallowObject,
    AfterValidator(_require_free),
    Field(description="More variables for the chat template, such as {'enable_thinking': false}."),
]


def template_options(given: JsonObject, reasoning_effort: str | None, verbosity: str | None) -> JsonObject:
    """Return the chat template's variables for one request; effort `none` also turns thinking off.

    >>> template_options({"x": 1}, "none", None)
    {'enable_thinking': False, 'reasoning_effort': 'none', 'x': 1}
    """
    options: dict[str, Any] = {"enable_thinking": False} if reasoning_effort == "none" else {}
    if reasoning_effort is not None:
        options["reasoning_effort"] = reasoning_effort
    if verbosity is not None:
        options["verbosity"] = verbosity
    return {**options, **given}


@record
class Conversation:
    """The conversation that one request asks to continue: a `Question`.

    `messages` are as chat completions write them; new ones are checked when they are placed.
    """

    messages: Sequence[JsonObject]
    tools: Tools = NO_TOOLS
    choice: ToolChoice = ToolChoice()
    template_options: JsonObject = field(default_factory=dict[str, Any])  # more variables for the chat template
    continues_last: bool = False  # the answer goes on where the last message, an assistant's, ends
    last_param: str | None = None  # the request's name for the last message, unless it is messages[INDEX]

    @property
    def may_call_tools(self) -> bool:
        return bool(self.tools.definitions) and self.choice.use is not ToolUse.NONE

    def require_no_calls(self, param: str) -> None:
        """Raise RequestError if an answer could call a tool, for a request whose `param` makes it JSON."""
        if self.may_call_tools:
            raise RequestError(
                f"{param} makes the whole answer JSON, so it could not call a tool; send it without tools, or with "
                "tool_choice 'none'",
                param=param,
                code="unsupported_parameter",
            )

    def is_single_call(self, may_be_parallel: bool) -> bool:
        """Return whether an answer ends with its first tool call."""
        return self.choice.only is not None or (not may_be_parallel and self.may_call_tools)

    def place(self, forest: Forest, renderer: Renderer, *, is_counted: bool = True) -> Prompt:
        if self.may_call_tools and not renderer.reads_calls:
            raise RequestError(UNREADABLE_CALLS, param="tools", code="unsupported_parameter")
        messages: Sequence[JsonObject] = self.messages
        opening = ""
        if self.continues_last:
            messages, opening = messages[:-1], self._given_opening(renderer)
        elif self.choice.use is ToolUse.REQUIRED:
            opening = renderer.answer_format.opening(self.choice.only)
        return forest.plan(
            messages,
            self.tools.definitions,
            normalise=read_message,
            opening=opening,
            options=renderer.options_read(self.template_options),
            is_counted=is_counted,
        )

    def reading(self, renderer: Renderer, prompt: Prompt) -> ChatReading:
        return ChatReading(
            answer_format=renderer.answer_format,
            may_call_tools=self.may_call_tools,
            is_thinking=prompt.is_thinking,
            opening=prompt.opening,
            given=_text_of_last(self.messages) if self.continues_last else None,
            only_tool=self.choice.only,
            accepts=self.tools.accepts if self.choice.allowed is None else self._accepts_allowed,
            tools=self.tools.definitions,
        )

    def takes_one_call(self, renderer: Renderer) -> bool:
        return self.may_call_tools and renderer.arrangement.has_one_call

    def _accepts_allowed(self, call: ToolCall) -> bool:
        assert self.choice.allowed is not None
        return call.name in self.choice.allowed and (self.tools.accepts is None or self.tools.accepts(call))

    def _given_opening(self, renderer: Renderer) -> str:
        """Return the opening that repeats the last message. Raises RequestError if that cannot be continued."""
        last = self.last_param or f"messages[{len(self.messages) - 1}]"
        message = read_message(self.messages[-1], len(self.messages) - 1)
        text: str = message["content"]
        if len(self.messages) == 1:
            raise RequestError(
                f"{last} cannot be continued: it is the only message; send a question before it",
                param=last,
                code="invalid_value",
            )
        if message["role"] != "assistant" or message.get("tool_calls") or message.get("reasoning_content"):
            raise RequestError(
                f"{last} cannot be continued: only an assistant's message with text and nothing else can",
                param=last,
                code="invalid_value",
            )
        if isinstance(renderer.form(message)["content"], Shielded) or any(
            tag in text for tag in (renderer.thinking.begin, renderer.thinking.end)
        ):
            raise RequestError(
                f"{last} cannot be continued: it contains special tokens or the tags of thinking; leave them out",
                param=last,
                code="invalid_value",
            )
        return renderer.answer_format.opening_of_text(text)


def _text_of_last(messages: Sequence[JsonObject]) -> str:
    return read_message(messages[-1], len(messages) - 1)["content"]


class Translated:
    """Remembers one session's translation into messages, so that each request translates only what it adds.

    An agent repeats its conversation, but for marks that it may move from item to item (`cache_control`).
    """

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._ends: list[int] = []  # of the parts that were translated together
        self._messages: list[list[JsonObject]] = []  # of each part

    def messages(
        self,
        items: list[Any],
        translate: Callable[[list[Any], int], list[JsonObject]],
        *,
        may_keep: bool = True,
        one_by_one: bool = False,
    ) -> list[JsonObject]:
        """Return the messages of `items`. `translate` gets those that are new, and the index of the first.

        Pass `may_keep` as false if later items may join the last message, `one_by_one` as true if items never join.
        """
        num_parts = bisect_right(self._ends, sum(takewhile(bool, map(_is_same_json, self._items, items))))
        num_known = self._ends[num_parts - 1] if num_parts else 0
        size = 1 if one_by_one else max(1, len(items))
        starts = range(num_known, len(items), size)
        messages = self._messages[:num_parts] + [translate(items[start : start + size], start) for start in starts]
        if may_keep:
            self._ends = self._ends[:num_parts] + [min(start + size, len(items)) for start in starts]
            self._items, self._messages = items, messages
        return [message for part in messages for message in part]

    def forget(self) -> None:
        """Release everything; the next request is translated whole."""
        self._items, self._ends, self._messages = [], [], []


def _is_same_json(one: object, other: object) -> bool:
    return one is other or orjson.dumps(one) == orjson.dumps(other)
