"""Tool calls as Mistral's models write them: a list until version 11 of their tokenizer, a tag for each call since.

::

    [TOOL_CALLS] [{"name": "python", "arguments": {"code": "print(6 * 7)"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]python[ARGS]{"code": "print(6 * 7)"}
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.formats.base import (
    BARE_NAME,
    Marks,
    PartialCall,
    ToolCall,
    open_envelope,
    read_envelope,
    write_envelope,
)
from areal_agent.tokens.formats.cursor import Cursor

_TAG, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ARGUMENTS = "arguments"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistral:
    """Writes the list if `is_list`, else the tagged form; reads both."""

    is_list: bool

    marks = Marks(openings=(_TAG,), closing="}", separators=(",",), endings=("]",))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == "," or cursor.accept("["):
            cursor.expect("{")
            read_envelope(cursor, call, argument_keys=(_ARGUMENTS,))
        else:
            self._read_named(cursor, call)

    def _read_named(self, cursor: Cursor, call: PartialCall) -> None:
        call.set_name(cursor.take(BARE_NAME))
        if cursor.accept(_CALL_ID):
            call.id = cursor.take(BARE_NAME)
        cursor.expect(_ARGS)
        cursor.expect("{")
        call.read_arguments(cursor)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        if self.is_list:
            return f"{content}{_TAG} [{', '.join(write_envelope(call, _ARGUMENTS) for call in calls)}]"
        return content + "".join(f"{_TAG}{call.name}{_ARGS}{call.arguments_json}" for call in calls)

    def opening(self, tool_name: str | None) -> str:
        if tool_name is None:
            return _TAG
        return f"{_TAG} [{open_envelope(tool_name, _ARGUMENTS)}" if self.is_list else f"{_TAG}{tool_name}{_ARGS}"
