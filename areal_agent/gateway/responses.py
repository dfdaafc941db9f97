"""`/v1/responses`, what comes in: `ResponsesRequest` is the body, and its items become messages of a conversation.

An answer of this protocol is several items, which clients send back one by one. `messages_of` joins them again, so that
a conversation has the same messages as in chat completions::

    reasoning, message (assistant), function_call, function_call     one assistant message
    function_call_output                                             one tool message
    custom_tool_call                                                 a call with the one argument `input`

Each of OpenAI's parameters is honoured, or refused by name when its value asks for something; none is silently dropped.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args

import orjson
from pydantic import (
    AfterValidator,
    AliasChoices,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    model_validator,
)

from areal_agent.gateway.bodies import (
    Body,
    Harmless,
    Name,
    PositiveCount,
    ShallowObject,
    Unsupported,
    json_kind,
    read_as,
    refuse,
)
from areal_agent.gateway.chat import ANY_OBJECT, NamedSchema, PlainFormat
from areal_agent.gateway.conversation import (
    PASSED_ON,
    Conversation,
    ImagePart,
    TemplateOptions,
    TextOr,
    TextPart,
    content_of,
    kind_of_part,
    read_arguments,
    template_options,
)
from areal_agent.gateway.images import schema_of
from areal_agent.gateway.order import MAX_TOP_LOGPROBS, Order, OrderBody
from areal_agent.gateway.tools import (
    NO_TOOLS,
    Function,
    ToolChoice,
    ToolName,
    Tools,
    ToolUse,
    reader_of_tools,
    strict_tools,
)
from areal_agent.types import JsonObject

SEALED = "areal_agent:"
"""How `encrypted_content` begins that this gateway wrote; the reasoning follows, as it is."""

CUSTOM_INPUT = "input"
"""The one parameter of the function that stands for a custom tool."""

# ---------------------------------------------------------------------------------------------------------- items


class Part(TextPart):
    """A text part of a message, or of a tool's output."""

    type: Literal["input_text", "output_text", "refusal"]  # type: ignore[assignment]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


SeenPart = Annotated[
    Annotated[ImagePart, schema_of("input_image"), Tag("an image")] | Annotated[Part, Tag("a text")],
    Discriminator(kind_of_part),
]

Seen = TextOr[SeenPart]


class Loose(Body):
    """An object whose other fields add nothing to the prompt (`id`, `status`, `phase` ...) and are ignored."""

    model_config = ConfigDict(extra="ignore")


class MessageItem(Loose):
    """A message. An assistant's is the text of an answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Seen


class ReasoningText(Loose):
    """A part of a reasoning item."""

    text: str


class ReasoningItem(Loose):
    """The reasoning of an answer: its `content`, else what `encrypted_content` or `summary` has of it."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list[ReasoningText])
    encrypted_content: str = Field(
        default="", description="As this gateway wrote it; that of another service cannot be read and is ignored."
    )
    summary: list[ReasoningText] = Field(default_factory=list[ReasoningText])


def _require_arguments(text: str) -> str:
    read_arguments(text)
    return text


class FunctionCallItem(Loose):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str = ""
    arguments: Annotated[str, AfterValidator(_require_arguments)] = "{}"


class CustomCallItem(Loose):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str = ""
    input: str


class CallOutputItem(Loose):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Seen


class ItemReference(Loose):
    """An item of an earlier answer, by its id."""

    type: Literal["item_reference"]
    id: Name


Item = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem | ItemReference

ITEMS: Mapping[str, TypeAdapter[Item]] = {
    kind: TypeAdapter(item)
    for item in (MessageItem, ReasoningItem, FunctionCallItem, CustomCallItem, CallOutputItem, ItemReference)
    for kind in get_args(item.model_fields["type"].annotation)
}


class Slot(IntEnum):
    """The parts of an assistant's message, in their order."""

    REASONING = 0
    TEXT = 1
    CALL = 2


def messages_of(items: Sequence[object], first: int, find: Callable[[str, str], JsonObject]) -> list[JsonObject]:
    """Translate `items`, which begin at `input[first]`, into messages as chat completions write them.

    An item joins the assistant's message before it if that has no such part yet and no later one; a call may follow
    calls. `find` returns an item of an earlier answer by its id and the name of the parameter that has it.
    """
    messages: list[JsonObject] = []
    last: Slot | None = None
    for index, value in enumerate(items, start=first):
        slot, message = _part_of_message(_read_item(value, f"input[{index}]", find))
        if slot is None or last is None or not (slot > last or slot == last == Slot.CALL):
            messages.append(message)
        else:
            calls = [*messages[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
            messages[-1] = {**messages[-1], **message, **({"tool_calls": calls} if calls else {})}
        last = slot
    return messages


def may_be_joined(item: object) -> bool:
    """Return whether an item that follows could be a part of the same message."""
    kind = _kind(item)
    if kind == "message" and isinstance(item, dict):
        return cast("JsonObject", item).get("role") == "assistant"
    return not kind.endswith("_output")


def _part_of_message(item: Item) -> tuple[Slot | None, JsonObject]:
    """Return a message, or a part of an assistant's message and its slot."""
    match item:
        case MessageItem(role=role, content=content):
            if role == "assistant":
                return Slot.TEXT, {"role": role, "content": content_of(content, "")}
            return None, {"role": role, "content": content_of(content)}
        case ReasoningItem():
            sealed = item.encrypted_content
            text = _joined(item.content) or (sealed[len(SEALED) :] if sealed.startswith(SEALED) else "")
            reasoning = text or _joined(item.summary)
            return Slot.REASONING, {"role": "assistant"} | ({"reasoning_content": reasoning} if reasoning else {})
        case FunctionCallItem(arguments=arguments) | CustomCallItem(input=arguments):
            is_custom = isinstance(item, CustomCallItem)
            name = full_name(item.namespace, item.name)
            function = {"name": name, "arguments": {CUSTOM_INPUT: arguments} if is_custom else arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            return Slot.CALL, {"role": "assistant", "tool_calls": [call]}
        case CallOutputItem(call_id=call_id, output=output):
            return None, {"role": "tool", "tool_call_id": call_id, "content": content_of(output)}
        case ItemReference():
            raise AssertionError("references are resolved before")


def _joined(texts: Sequence[ReasoningText]) -> str:
    return "".join(part.text for part in texts)


def _read_item(value: object, where: str, find: Callable[[str, str], JsonObject]) -> Item:
    kind = _kind(value)
    if kind not in ITEMS:
        refuse(f"{where}.type", kind, f"one of {', '.join(map(repr, ITEMS))}")
    item = read_as(ITEMS[kind], value, where)
    return _read_item(find(item.id, f"{where}.id"), where, find) if isinstance(item, ItemReference) else item


def _kind(item: object) -> str:
    """Return the type of an item; one without a type is a message."""
    kind = cast("JsonObject", item).get("type") if isinstance(item, dict) else None
    return "message" if kind is None else str(kind)


# ---------------------------------------------------------------------------------------------------------- tools


class FunctionTool(Function):
    """A function that the model may call."""

    ignores_empty: ClassVar[bool] = True

    type: Literal["function"]
    parameters: ShallowObject | None = None
    output_schema: Harmless = None

    def definition(self, namespace: str = "") -> JsonObject:
        """Return it as chat completions write it: the template prints it so."""
        function = self.model_dump(include=set(Function.model_fields), exclude_unset=True)
        return {"type": "function", "function": function | {"name": full_name(namespace, self.name)}}


class PlainInput(Body):
    """Free text."""

    type: Literal["text"]


class CustomTool(Body):
    """A tool that takes free text. The model sees a function with the one parameter `input`."""

    ignores_empty: ClassVar[bool] = True

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: PlainInput | None = Field(default=None, description="Grammars are not supported.")

    def definition(self, namespace: str = "") -> JsonObject:
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        function = {"description": self.description, "parameters": parameters, "strict": True}
        return FunctionTool.read({"type": "function", "name": self.name, **function}).definition(namespace)


class Namespace(Body):
    """Tools under one name; the model sees each as `NAMESPACE.TOOL`. The description is not shown to it."""

    type: Literal["namespace"]
    name: ToolName
    description: Any = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


Tool = Annotated[FunctionTool | CustomTool | Namespace, Field(discriminator="type")]

TOOLS: TypeAdapter[list[FunctionTool | CustomTool | Namespace]] = TypeAdapter(list[Tool])


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTools:
    """The tools of a request, as a chat has them, and which kinds of items their calls are."""

    tools: Tools = NO_TOOLS
    custom: Collection[str] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict[str, str])  # by the full name of a tool that is in one


@reader_of_tools
def read_flat_tools(text: bytes) -> FlatTools:
    """Check `tools`; raises RequestError naming the place."""
    tools = list(_flat(read_as(TOOLS, orjson.loads(text), "tools")))
    definitions = [tool.definition(namespace) for _, namespace, tool in tools]
    return FlatTools(
        tools=Tools(
            definitions=definitions, accepts=strict_tools(definitions, [f"{one[0]}.parameters" for one in tools])
        ),
        custom={full_name(namespace, tool.name) for _, namespace, tool in tools if isinstance(tool, CustomTool)},
        namespaces={full_name(namespace, tool.name): namespace for _, namespace, tool in tools if namespace},
    )


def _flat(
    tools: Iterable[FunctionTool | CustomTool | Namespace],
) -> Iterator[tuple[str, str, FunctionTool | CustomTool]]:
    """Yield the place of each tool in the request, its namespace, and the tool."""
    for index, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            for number, one in enumerate(tool.tools):
                yield f"tools[{index}].tools[{number}]", tool.name, one
        else:
            yield f"tools[{index}]", "", tool


def full_name(namespace: str, name: str) -> str:
    """Return the name by which the model knows a tool.

    >>> full_name("files", "read"), full_name("", "read")
    ('files.read', 'read')
    """
    return f"{namespace}.{name}" if namespace else name


class ToolReference(Body):
    """A tool by its full name."""

    type: Literal["function", "custom"]
    name: ToolName


class AllowedReferences(Body):
    """The tools that may be called. The others stay in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(min_length=1)]


# ----------------------------------------------------------------------------------------------------- the body


class FlatSchema(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    description: str | None = None


class TextOptions(Body):
    """The form of the answer's text."""

    format: Annotated[PlainFormat | FlatSchema, Field(discriminator="type")] | None = Field(
        default=None, description="Anything but `text` needs an engine with grammars; it is refused elsewhere."
    )
    verbosity: Name | None = Field(default=None, description=PASSED_ON)


class ReasoningOptions(Body):
    """The reasoning that is wanted."""

    effort: Name | None = Field(default=None, description=PASSED_ON)
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Accepted: the answer has the reasoning itself, as the content of its reasoning item."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(default=None, description="As `summary`.")
    context: Annotated[Any, Unsupported("auto")] = None
    mode: Annotated[Any, Unsupported("standard")] = None


def _read_input(value: object) -> str | list[Any]:
    if not isinstance(value, str | list):
        refuse("input", value, "a text, or a list of items")
    return cast("str | list[Any]", value)


class ResponsesRequest(OrderBody):
    """The body of a request for a response."""

    # Kept as the agent wrote it; new items are checked when the request meets its session.
    input: Annotated[str | list[Any], PlainValidator(_read_input, json_schema_input_type=str | list[Item])] = Field(
        default_factory=list[Any], description="A text, or items. May be left out with `previous_response_id`."
    )
    instructions: str | None = Field(default=None, description="The first system message.")
    previous_response_id: Name | None = Field(
        default=None,
        description="Continue after this answer of the session. Its instructions are not carried over.",
    )
    tools: Annotated[FlatTools, PlainValidator(read_flat_tools, json_schema_input_type=list[Tool])] = FlatTools()
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("a string")]
        | Annotated[ToolReference | AllowedReferences, Field(discriminator="type"), Tag("an object")],
        Discriminator(json_kind),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list[Any],
        description="`reasoning.encrypted_content` is the reasoning as it is, for clients that send nothing else back.",
    )
    max_tokens: PositiveCount | None = Field(
        default=None, alias="max_output_tokens", description="Reduced to the room left in the context."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    store: bool = Field(default=True, description="Keep the answer until the session ends.")
    background: bool = Field(default=False, description="Answer at once; the response is fetched by its id.")
    metadata: ShallowObject | None = None
    chat_template_kwargs: TemplateOptions = Field(default_factory=dict[str, Any])

    client_metadata: Harmless = None
    num_choices: Annotated[int, Unsupported(1)] = Field(default=1, alias="n")

    access_programs: Annotated[Any, Unsupported()] = None
    background_options: Annotated[Any, Unsupported()] = None
    context_management: Annotated[Any, Unsupported([])] = None
    conversation: Annotated[Any, Unsupported()] = None
    image: Annotated[Any, Unsupported()] = None
    max_tool_calls: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    truncation: Annotated[Any, Unsupported("disabled")] = None

    # ------------------------------------------------------------------------------------- what must agree

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.input and self.previous_response_id is None:
            refuse("input", self.input, "a text, or a list of at least one item")
        if self.top_logprobs and self.num_top_logprobs is None:
            refuse("top_logprobs", self.top_logprobs, "sent together with include=['message.output_text.logprobs']")
        if self.background and (self.is_streamed or not self.store):
            refuse("background", True, "false where stream is true or store is false")
        param = "tool_choice.name" if isinstance(self.tool_choice, ToolReference) else "tool_choice"
        self.choice.require_known(self.tools.tools.definitions, param)
        if self.json_schema is not None:
            self.conversation_of([]).require_no_calls("text.format")
        return self

    # --------------------------------------------------------------------------------------- what it means

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if "message.output_text.logprobs" in self.include else None

    @property
    def json_schema(self) -> str | None:
        form = self.text.format
        if isinstance(form, FlatSchema):
            return orjson.dumps(form.definition).decode()
        return ANY_OBJECT if form and form.type == "json_object" else None

    @property
    def choice(self) -> ToolChoice:
        match self.tool_choice:
            case ToolReference(name=name):
                return ToolChoice(use=ToolUse.REQUIRED, only=name)
            case AllowedReferences(mode=mode, tools=tools):
                return ToolChoice(use=ToolUse(mode), allowed={tool.name for tool in tools})
            case use:
                return ToolChoice(use=ToolUse(use))

    def conversation_of(self, messages: Sequence[JsonObject]) -> Conversation:
        """Return the conversation that it asks to continue, given its messages."""
        return Conversation(
            messages=messages,
            tools=self.tools.tools,
            choice=self.choice,
            template_options=template_options(self.chat_template_kwargs, self.reasoning.effort, self.text.verbosity),
        )

    def order_of(self, messages: Sequence[JsonObject]) -> Order:
        """Return what the session needs to know of it, given its messages."""
        conversation = self.conversation_of(messages)
        return Order(
            id_prefix="resp_",
            model=self.model,
            prompt_param="input",
            questions=(conversation,),
            is_streamed=self.is_streamed,
            wishes=self,
            stops=self.stops,
            seed=self.seed,
            num_top_logprobs=self.num_top_logprobs,
            json_schema=self.json_schema,
            schema_param="text.format",
            is_single_call=conversation.is_single_call(self.parallel_tool_calls),
            is_kept=self.store,
        )
