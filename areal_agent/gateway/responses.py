"""`/v1/responses`, what comes in: `ResponsesRequest` is the body, and its items become messages of a conversation.

An answer of this protocol is several items, which clients send back one by one. `messages_of` joins them again, so that
a conversation has the same messages as in chat completions::

    reasoning, message (assistant), function_call, function_call     one assistant message
    function_call_output                                             one tool message
    custom_tool_call                                                 a call with the one argument `input`

Each of OpenAI's parameters is honoured, or refused by name when its value asks for something; none is silently dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import orjson
from pydantic import Discriminator, Field, PlainValidator, Tag, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from areal_agent.errors import RequestError
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
    MAX_KNOWN_BYTES,
    NO_TOOLS,
    PASSED_ON,
    Conversation,
    Open,
    TemplateOptions,
    ToolChoice,
    ToolName,
    Tools,
    ToolUse,
    strict_tools,
    template_options,
)
from areal_agent.gateway.order import MAX_TOP_LOGPROBS, Order, OrderBody
from areal_agent.types import JsonObject

SEALED = "areal_agent:"
"""How `encrypted_content` begins that this gateway wrote; the reasoning follows, as it is."""

CUSTOM_INPUT = "input"
"""The one parameter of the function that stands for a custom tool."""

# ---------------------------------------------------------------------------------------------------------- items


class Slot(IntEnum):
    """The parts of an assistant's message, in their order."""

    REASONING = 0
    TEXT = 1
    CALL = 2


class Item(Open):
    """An item of the input. What adds nothing to the prompt (`id`, `status`, `phase` ...) is ignored."""

    slot: ClassVar[Slot | None] = None
    """Its place in an assistant's message; None for an item that is a message of its own."""

    def message(self) -> JsonObject:
        """Return the message, or the part of an assistant's message, that it stands for."""
        raise NotImplementedError


class TextPart(Open):
    """A text part of a message, or of a tool's output."""

    type: Literal["input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _require_text(cls, value: object) -> object:
        if isinstance(value, dict):
            part = cast("JsonObject", value)
            kind = part.get("type")
            if kind not in ("input_text", "output_text", "refusal"):
                raise PydanticCustomError(
                    "unsupported_content",
                    "has type {type}: this gateway takes text only, no images, audio or files; "
                    "send {{'type': 'input_text', 'text': ...}}",
                    {"type": f"{kind!r:.80}"},
                )
            name = "refusal" if kind == "refusal" else "text"
            if not isinstance(part.get(name), str):
                raise PydanticCustomError("unsupported_content", "needs the string {name}", {"name": repr(name)})
        return cast("object", value)


Texts = Annotated[
    Annotated[str, Tag("a string")] | Annotated[list[TextPart], Tag("a list")],
    Discriminator(json_kind),
]


def _joined(texts: str | list[TextPart]) -> str:
    return texts if isinstance(texts, str) else "".join(part.text or part.refusal for part in texts)


class MessageItem(Item):
    """A message. An assistant's is the text of an answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Texts

    @property
    def slot(self) -> Slot | None:  # type: ignore[override]  # it depends on the role
        return Slot.TEXT if self.role == "assistant" else None

    def message(self) -> JsonObject:
        return {"role": self.role, "content": _joined(self.content)}


class ReasoningText(Open):
    """A part of a reasoning item."""

    text: str


class ReasoningItem(Item):
    """The reasoning of an answer: its `content`, or what `encrypted_content` or `summary` has of it."""

    slot = Slot.REASONING

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list[ReasoningText])
    summary: list[ReasoningText] = Field(default_factory=list[ReasoningText])
    encrypted_content: str = Field(
        default="", description="As this gateway wrote it; that of another service cannot be read and is ignored."
    )

    def message(self) -> JsonObject:
        sealed = self.encrypted_content.removeprefix(SEALED) if self.encrypted_content.startswith(SEALED) else ""
        text = "".join(part.text for part in self.content) or sealed or "".join(part.text for part in self.summary)
        return {"role": "assistant", "reasoning_content": text} if text else {"role": "assistant"}


class CallItem(Item):
    """A call of a tool."""

    slot = Slot.CALL

    call_id: str
    name: str
    namespace: str | None = None

    @property
    def arguments_json(self) -> str | JsonObject:
        """The arguments, as text or as an object."""
        raise NotImplementedError

    def message(self) -> JsonObject:
        function = {"name": full_name(self.namespace, self.name), "arguments": self.arguments_json}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


class FunctionCallItem(CallItem):
    """A call of a function."""

    type: Literal["function_call"]
    arguments: str

    @property
    def arguments_json(self) -> str:
        return self.arguments


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str

    @property
    def arguments_json(self) -> JsonObject:
        return {CUSTOM_INPUT: self.input}


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Texts

    def message(self) -> JsonObject:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class ItemReference(Open):
    """An item of an earlier answer, by its id."""

    type: Literal["item_reference"]
    id: Name


AnyItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem | CallOutputItem | ItemReference

ITEMS: Mapping[str, TypeAdapter[Any]] = {
    "message": TypeAdapter(MessageItem),
    "reasoning": TypeAdapter(ReasoningItem),
    "function_call": TypeAdapter(FunctionCallItem),
    "custom_tool_call": TypeAdapter(CustomCallItem),
    "function_call_output": TypeAdapter(CallOutputItem),
    "custom_tool_call_output": TypeAdapter(CallOutputItem),
    "item_reference": TypeAdapter(ItemReference),
}


def messages_of(items: Sequence[object], first: int, find: Callable[[str, str], JsonObject]) -> list[JsonObject]:
    """Translate `input[first:]`, which is `items`, into messages as chat completions write them.

    An item joins the assistant's message before it if that has no such part yet and no later one; a call may follow
    calls. `find` returns an item of an earlier answer by its id and the name of the parameter that has it.
    """
    messages: list[JsonObject] = []
    last: Slot | None = None
    for index, value in enumerate(items, start=first):
        item = _read_item(value, f"input[{index}]", find)
        message, slot = item.message(), item.slot
        if slot is None or last is None or not (slot > last or slot == last == Slot.CALL):
            messages.append(message)
        else:
            calls = [*messages[-1].get("tool_calls", ()), *message.get("tool_calls", ())]
            messages[-1] = {**messages[-1], **message, **({"tool_calls": calls} if calls else {})}
        last = slot
    return messages


def may_be_joined(item: object) -> bool:
    """Return whether an item after this last one could be a part of the same message."""
    kind = _kind(item)
    if kind == "message":
        return cast("JsonObject", item).get("role") == "assistant"
    return not kind.endswith("_output")


def _read_item(value: object, where: str, find: Callable[[str, str], JsonObject]) -> Item:
    item = read_as(_adapter(value, where), value, where)
    return _read_item(find(item.id, f"{where}.id"), where, find) if isinstance(item, ItemReference) else item


def _adapter(value: object, where: str) -> TypeAdapter[Any]:
    adapter = ITEMS.get(_kind(value))
    if adapter is None:
        refuse(f"{where}.type", cast("JsonObject", value).get("type"), f"one of {', '.join(map(repr, ITEMS))}")
    return adapter


def _kind(item: object) -> str:
    """Return the type of an item; one without a type is a message."""
    kind = cast("JsonObject", item).get("type") if isinstance(item, dict) else None
    return "message" if kind is None else str(kind)


# ---------------------------------------------------------------------------------------------------------- tools


class FunctionTool(Body):
    """A function that the model may call. With `strict`, a call whose arguments do not match is malformed."""

    ignores_empty: ClassVar[bool] = True

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: ShallowObject | None = None
    strict: bool | None = None
    output_schema: Harmless = None

    def definition(self) -> JsonObject:
        """Return it as chat completions write it: the template prints it so."""
        return _definition(self.name, self.description, self.parameters, self.strict)


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

    def definition(self) -> JsonObject:
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return _definition(self.name, self.description, parameters, True)


class Namespace(Body):
    """Tools under one name. The model sees each as `NAMESPACE.TOOL`, with both descriptions."""

    ignores_empty: ClassVar[bool] = True

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]

    def members(self) -> list[FunctionTool | CustomTool]:
        return [
            tool.model_copy(
                update={
                    "name": full_name(self.name, tool.name),
                    "description": "\n".join(filter(None, (self.description, tool.description))) or None,
                }
            )
            for tool in self.tools
        ]


AnyTool = Annotated[FunctionTool | CustomTool | Namespace, Field(discriminator="type")]

TOOLS: TypeAdapter[list[FunctionTool | CustomTool | Namespace]] = TypeAdapter(list[AnyTool])


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatTools:
    """The tools of a request, and what tells its answer which kind of item a call is."""

    tools: Tools
    custom: frozenset[str]
    namespaces: Mapping[str, str]  # by the full name of a tool that is in one


NO_FLAT_TOOLS = FlatTools(tools=NO_TOOLS, custom=frozenset(), namespaces={})


def read_flat_tools(value: object) -> FlatTools:
    """Check `tools`; raises RequestError naming the place. The last sets are cached, as in `read_tools`."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        refuse("tools", "a list", f"JSON that can be encoded again ({error})")
    return _tools_of(text) if len(text) <= MAX_KNOWN_BYTES else _tools_of.__wrapped__(text)


@lru_cache(maxsize=64)
def _tools_of(text: bytes) -> FlatTools:
    tools: list[FunctionTool | CustomTool] = []
    params: list[str] = []
    namespaces: dict[str, str] = {}
    for index, tool in enumerate(read_as(TOOLS, orjson.loads(text), "tools")):
        if isinstance(tool, Namespace):
            members = tool.members()
            tools += members
            params += [f"tools[{index}].tools[{number}].parameters" for number in range(len(members))]
            namespaces |= dict.fromkeys((member.name for member in members), tool.name)
        else:
            tools.append(tool)
            params.append(f"tools[{index}].parameters")
    definitions = [tool.definition() for tool in tools]
    return FlatTools(
        tools=Tools(definitions=definitions, accepts=strict_tools(definitions, params)),
        custom=frozenset(tool.name for tool in tools if isinstance(tool, CustomTool)),
        namespaces=namespaces,
    )


def _definition(
    name: str, description: str | None, parameters: JsonObject | None, strict: bool | None
) -> dict[str, Any]:
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool.

    >>> full_name("files", "read"), full_name(None, "read")
    ('files.read', 'read')
    """
    return name if namespace is None else f"{namespace}.{name}"


class NamedTool(Body):
    """A tool by its name; `namespace` may also be a part of the name."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None

    @property
    def full_name(self) -> str:
        return full_name(self.namespace, self.name)


class AllowedTools(Body):
    """The tools that may be called. The others stay in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


# ----------------------------------------------------------------------------------------------------- the body


class FlatSchema(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


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
    input: Annotated[str | list[Any], PlainValidator(_read_input, json_schema_input_type=str | list[AnyItem])] = Field(
        default_factory=list[Any], description="A text, or items. May be left out with `previous_response_id`."
    )
    instructions: str | None = Field(default=None, description="The first system message.")
    previous_response_id: Name | None = Field(
        default=None,
        description="Continue after this answer of the session. Its instructions are not carried over.",
    )
    tools: Annotated[FlatTools, PlainValidator(read_flat_tools, json_schema_input_type=list[AnyTool])] = NO_FLAT_TOOLS
    tool_choice: Annotated[
        Annotated[Literal["auto", "none", "required"], Tag("a string")]
        | Annotated[NamedTool | AllowedTools, Field(discriminator="type"), Tag("an object")],
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
        param = "tool_choice.name" if isinstance(self.tool_choice, NamedTool) else "tool_choice"
        self.choice.require_known(self.tools.tools.definitions, param)
        if self.json_schema is not None and self.conversation_of([]).may_call_tools:
            raise RequestError(
                "text.format makes the whole answer JSON, so it could not call a tool; send it without tools, or with "
                "tool_choice 'none'",
                param="text.format",
                code="unsupported_parameter",
            )
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
            case NamedTool() as tool:
                return ToolChoice(use=ToolUse.REQUIRED, only=tool.full_name)
            case AllowedTools(mode=mode, tools=tools):
                return ToolChoice(use=ToolUse(mode), allowed={tool.full_name for tool in tools})
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
            wishes=self,
            stops=self.stops,
            seed=self.seed,
            num_top_logprobs=self.num_top_logprobs,
            json_schema=self.json_schema,
            schema_param="text.format",
            is_single_call=conversation.is_single_call(self.parallel_tool_calls),
            is_kept=self.store,
        )
