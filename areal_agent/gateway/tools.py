"""The tools of a request: their definitions, the schemas that calls of strict ones have to match, and how an answer may
use them.

A call of a `strict` tool counts as a call only if its arguments match the tool's schema. No grammar enforces the schema
during sampling; a call that does not match is malformed and stays text.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import jsonschema_rs
import orjson
from pydantic import Field, TypeAdapter

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import Body, Open, read_as, refuse
from areal_agent.tokens.formats.base import ToolCall
from areal_agent.types import JsonObject

T = TypeVar("T")

MAX_KNOWN_BYTES = 2**16
"""A set of tools with longer JSON is not cached."""

LINEAR_PATTERNS = jsonschema_rs.RegexOptions()
"""Regular expressions without backtracking: a schema comes from outside and must not block the event loop."""

Accepts = Callable[[ToolCall], bool]


def strict_tools(tools: Sequence[JsonObject], params: Sequence[str] = ()) -> Accepts | None:
    """Return a function that accepts or rejects a call; None when no tool is strict.

    `params` are the names of the parameters that have the schemas, if they differ from those of chat completions.

    Raises RequestError for an invalid schema or one that refers to another document.
    """
    validators = {
        tool["function"]["name"]: _validator(
            tool["function"].get("parameters"), params[index] if params else f"tools[{index}].function.parameters"
        )
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


ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
"""OpenAI's pattern plus the dot, and up to 128 characters, which the names of MCP servers' tools need.

A forced call puts the name into the prompt, so it must not contain special tokens.
"""


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

    definitions: Sequence[JsonObject]  # as they came, without nulls, in their key order: the template prints them
    accepts: Accepts | None  # accepts or rejects a call; None if no tool is strict


NO_TOOLS = Tools(definitions=(), accepts=None)


def without_nulls(fields: JsonObject) -> JsonObject:
    """Return the fields that have a value: templates would write the others."""
    return {name: value for name, value in fields.items() if value is not None}


def reader_of_tools(read: Callable[[bytes], T]) -> Callable[[object], T]:
    """Return a reader of `tools` that caches what `read` makes of their JSON, because an agent repeats its tools.

    The key is their JSON, because 1, 1.0 and true are equal in Python but different in JSON.
    """
    cached = lru_cache(maxsize=64)(read)

    def reader(value: object) -> T:
        try:
            text = orjson.dumps(value)
        except orjson.JSONEncodeError as error:
            refuse("tools", "a list", f"JSON that can be encoded again ({error})")
        return cached(text) if len(text) <= MAX_KNOWN_BYTES else read(text)

    return reader


@reader_of_tools
def read_tools(text: bytes) -> Tools:
    """Check `tools`; raises RequestError naming the place."""
    definitions = orjson.loads(text)
    read_as(TOOLS, definitions, "tools")
    definitions = [tool | {"function": without_nulls(tool["function"])} for tool in definitions]
    return Tools(definitions=definitions, accepts=strict_tools(definitions))


class NamedFunction(Body):
    """A tool's name."""

    name: ToolName


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ToolUse(StrEnum):
    """The use that the model may make of the tools."""

    AUTO = "auto"  # the model decides
    NONE = "none"  # text that looks like a call is text
    REQUIRED = "required"  # the answer begins with a call


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """How an answer may use the tools."""

    use: ToolUse = ToolUse.AUTO
    only: str | None = None  # the one tool that must be called, exactly once
    allowed: Collection[str] | None = None  # a call of another tool is malformed; None: all are allowed

    def require_known(self, tools: Sequence[JsonObject], param: str) -> None:
        """Raise RequestError if the choice asks for tools that the request does not have."""
        names = [tool["function"]["name"] for tool in tools]
        for name in (self.only,) if self.only is not None else self.allowed or ():
            if name not in names:
                refuse(param, name, f"one of the tools: {', '.join(names) or 'there are none'}")
        if self.use is ToolUse.REQUIRED and not names:
            refuse(param, str(self.use), "'none' or left out where there are no tools")
