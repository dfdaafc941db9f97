"""Tool calls as Phi-4-mini writes them: a list after a word, or between tags.

::

    functools[{"name": "python", "arguments": {"code": "print(6 * 7)"}}]
    <|tool_call|>[{"name": "python", "arguments": {"code": "print(6 * 7)"}}]<|/tool_call|>
"""

from collections.abc import Sequence

from areal_agent.tokens.formats.base import Marks, PartialCall, ToolCall, open_envelope, read_envelope, write_envelope
from areal_agent.tokens.formats.cursor import Cursor

_WORD, _TAG, _TAG_END = "functools[", "<|tool_call|>", "<|/tool_call|>"
_ARGUMENTS = "arguments"


class Phi:
    """Writes the list after a word. Between tags one call needs no list."""

    marks = Marks(openings=(_WORD, _TAG), closing="}", separators=(",",), endings=("]", _TAG_END))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == _TAG:
            cursor.accept("[")
        cursor.expect("{")
        read_envelope(cursor, call, argument_keys=(_ARGUMENTS, "parameters"))

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        return f"{content}{_WORD}{', '.join(write_envelope(call, _ARGUMENTS) for call in calls)}]"

    def opening(self, tool_name: str | None) -> str:
        return _WORD + ("" if tool_name is None else open_envelope(tool_name, _ARGUMENTS))
