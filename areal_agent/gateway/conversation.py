"""The messages and tools of a chat: checked, and normalised for the chat template and for comparison.

A normalised message has its content as one string, the arguments of tool calls as parsed objects, and no key without
a value. A call of a tool with `strict: true` counts as a call only if its arguments match the tool's schema. No grammar
enforces the schema during sampling; a call that does not match is malformed and stays text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import jsonschema_rs
import orjson
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import Body, json_kind, read_as, refuse, require_shallow
from areal_agent.tokens.canonical import parse_json_object
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.types import JsonObject

MAX_KNOWN_BYTES = 2**16
"""A set of tools with longer JSON is not cached."""

LINEAR_PATTERNS = jsonschema_rs.RegexOptions()
"""Regular expressions without backtracking: a schema comes from outside and must not block the event loop."""

Accepts = Callable[[ToolCall], bool]


def strict_tools(tools: Sequence[JsonObject]) -> Accepts | None:
    """Return a function that accepts or rejects a call; None when no tool is strict.

    Raises RequestError for an invalid schema or one that refers to another document.
    """
    validators = {
        tool["function"]["name"]: _validator(tool["function"].get("parameters"), f"tools[{index}].function.parameters")
        for index, tool in enumerate(tools)
        if tool["function"].get("strict")
    }

    def accepts(call: ToolCall) -> bool:
        validator = validators.get(call.name)
        return validator is None or validator.is_valid(call.arguments)

    return accepts if validators else None  # calls of tools that are not strict are always accepted


def _validator(schema: JsonObject | None, param: str) -> "jsonschema_rs.Validator":
    try:
        return jsonschema_rs.validator_for(
            dict(schema or {}), retriever=_refuse_reference, pattern_options=LINEAR_PATTERNS
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:  # ValidationError is a ValueError
        raise RequestError(
            f"{param} is not a valid JSON schema ({error!s:.300}); correct it, or leave out 'strict'",
            param=param,
            code="invalid_value",
        ) from error


def _refuse_reference(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is another document; copy its definitions into the schema")


ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]
"""OpenAI's pattern plus the dot. A forced call puts the name into the prompt, so it must not contain special tokens."""


class Open(Body):
    """An object that is kept as it came; it may have fields beside the listed ones."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _check_depth(cls, value: object) -> object:
        return require_shallow(value)


# ------------------------------------------------------------------------------------------------------ messages


class TextPart(Open):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _require_text(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("type") != "text":
            raise PydanticCustomError(
                "unsupported_content",
                "has type {type}: this gateway takes text only, no images, audio or files; "
                "send {{'type': 'text', 'text': ...}}",
                {"type": f"{value.get('type')!r:.80}"},
            )
        return value


Content = Annotated[
    Annotated[str, Tag("a string")] | Annotated[list[TextPart], Tag("a list")],
    Discriminator(json_kind),
]


class FunctionCall(Body):
    """The tool of a call and its arguments."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: Annotated[
        Annotated[str, Tag("a string")] | Annotated[dict[str, Any], Tag("an object")],
        Discriminator(json_kind),
        Field(description="A JSON object, as text or as it is."),
    ]

    def normalised(self) -> JsonObject:
        arguments = self.arguments
        if isinstance(arguments, str):  # some clients send no arguments as an empty text
            parsed = parse_json_object(arguments) if arguments.strip() else {}
            arguments = arguments if parsed is None else parsed
        return {"name": self.name, "arguments": arguments}


class EchoedToolCall(Open):
    """A tool call in an earlier answer that the client sends back."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def normalised(self) -> JsonObject:
        return {"id": self.id, "type": "function", "function": self.function.normalised()}


class AnyMessage(Body):
    """Fields of messages of every role. Clients echo answers with all their fields: unknown empty ones are ignored."""

    ignores_empty: ClassVar[bool] = True

    name: str | None = None

    def _normalised(self, role: str, content: str | list[TextPart], **others: object) -> JsonObject:
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        fields = {"role": role, "content": text, "name": self.name, **others}
        return {name: value for name, value in fields.items() if value is not None}


class PromptMessage(AnyMessage):
    """A message of the user or the system. Chat templates get `developer` as `system`."""

    role: Literal["system", "developer", "user"]
    content: Content

    def normalised(self) -> JsonObject:
        return self._normalised("user" if self.role == "user" else "system", self.content)


class AssistantMessage(AnyMessage):
    """An answer of the assistant, sampled or written by the client."""

    role: Literal["assistant"]
    content: Content = ""
    reasoning_content: str | None = None
    tool_calls: list[EchoedToolCall] = Field(default_factory=list[EchoedToolCall])
    parsed: Annotated[Any, BeforeValidator(require_shallow)] = Field(
        default=None, description="The client's parsed content; ignored."
    )

    def normalised(self) -> JsonObject:
        calls = [call.normalised() for call in self.tool_calls]
        return self._normalised(
            self.role, self.content, reasoning_content=self.reasoning_content, tool_calls=calls or None
        )


class ToolMessage(AnyMessage):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None

    def normalised(self) -> JsonObject:
        return self._normalised(self.role, self.content, tool_call_id=self.tool_call_id)


Message = Annotated[PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]

MESSAGE: TypeAdapter[PromptMessage | AssistantMessage | ToolMessage] = TypeAdapter(Message)


def read_message(value: object, index: int) -> JsonObject:
    """Check and normalise the message `messages[index]`; raises RequestError naming the place."""
    return read_as(MESSAGE, value, f"messages[{index}]").normalised()


# --------------------------------------------------------------------------------------------------------- tools


class Function(Body):
    """A tool's name and parameters. With `strict`, a call whose arguments do not match the schema is malformed."""

    name: ToolName
    description: Any = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class Tool(Open):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


TOOLS = TypeAdapter(list[Tool])


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """A checked set of tools. Requests share it, so its definitions must not be changed."""

    definitions: Sequence[JsonObject]  # as they came, in their key order: the template prints them
    accepts: Accepts | None  # accepts or rejects a call; None if no tool is strict


def read_tools(value: object) -> Tools:
    """Check `tools`; raises RequestError naming the place. An agent repeats its tools, so the last sets are cached.

    The key is their JSON, because 1, 1.0 and true are equal in Python but different in JSON.
    """
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        refuse("tools", "a list", f"JSON that can be encoded again ({error})")
    return _tools_of(text) if len(text) <= MAX_KNOWN_BYTES else _tools_of.__wrapped__(text)


@lru_cache(maxsize=64)
def _tools_of(text: bytes) -> Tools:
    definitions = orjson.loads(text)
    read_as(TOOLS, definitions, "tools")
    return Tools(definitions=definitions, accepts=strict_tools(definitions))


class NamedFunction(Body):
    """A tool's name."""

    name: ToolName


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction
