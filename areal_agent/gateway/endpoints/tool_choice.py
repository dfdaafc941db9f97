"""Which tools an answer may or must call. It knows no format of calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from areal_agent.gateway.fields import as_flag, as_name, as_object, refuse, refuse_unknown
from areal_agent.types import JsonObject


class ToolUse(StrEnum):
    """What the model may do with the tools."""

    AUTO = "auto"  # it decides
    NONE = "none"  # what looks like a call is text
    REQUIRED = "required"  # its answer begins with a call


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """`tool_choice` and `parallel_tool_calls` of a body. A named tool is called once."""

    use: ToolUse
    name: str | None  # the one tool that must be called
    is_single: bool  # the answer ends with its first call

    @classmethod
    def read(cls, body: JsonObject, tools: Sequence[JsonObject]) -> Self:
        """Take it from a body with these tools; raises RequestError when it asks for what cannot be."""
        use, name = _read_use(body.get("tool_choice"), tools)
        parallel = body.get("parallel_tool_calls")
        is_single = parallel is not None and not as_flag(parallel, "parallel_tool_calls")
        return cls(use=use, name=name, is_single=name is not None or (is_single and use is not ToolUse.NONE))

    @property
    def may_call(self) -> bool:
        return self.use is not ToolUse.NONE


def _read_use(value: object, tools: Sequence[JsonObject]) -> tuple[ToolUse, str | None]:
    if value is None:
        return (ToolUse.AUTO if tools else ToolUse.NONE), None
    if isinstance(value, dict):
        return ToolUse.REQUIRED, _read_named(as_object(value, "tool_choice"), tools)
    if not isinstance(value, str) or value not in list(ToolUse):
        refuse("tool_choice", value, "'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}")
    if value == ToolUse.REQUIRED and not tools:
        refuse("tool_choice", value, "'none' or left out where there are no tools")
    return ToolUse(value) if tools else ToolUse.NONE, None


def _read_named(choice: JsonObject, tools: Sequence[JsonObject]) -> str:
    refuse_unknown(choice, ("type", "function"), "tool_choice.")
    if choice.get("type") != "function":
        refuse("tool_choice.type", choice.get("type"), "'function'")
    function = as_object(choice.get("function"), "tool_choice.function")
    refuse_unknown(function, ("name",), "tool_choice.function.")
    name = as_name(function.get("name"), "tool_choice.function.name")
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        refuse("tool_choice.function.name", name, f"one of the tools: {', '.join(names) or 'there are none'}")
    return name
