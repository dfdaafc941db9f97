"""Tool calls as Hermes, Qwen and many others write them.

::

    Let me compute that.
    <tool_call>
    {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    </tool_call>
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.formats.base import Marks, PartialCall, ToolCall, open_envelope, read_envelope, write_envelope
from areal_agent.tokens.formats.cursor import Cursor

_BEGIN, _END = "<tool_call>", "</tool_call>"
_ARGUMENTS = "arguments"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hermes:
    """Writes `newline` between the tags and the call, and between calls; reads calls with and without it."""

    newline: str

    marks = Marks(openings=(_BEGIN,), closing=_END)

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        cursor.expect("{")
        read_envelope(cursor, call, argument_keys=(_ARGUMENTS,))
        cursor.expect(_END)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        blocks = (self.newline.join((_BEGIN, write_envelope(call, _ARGUMENTS), _END)) for call in calls)
        return self.newline.join((content, *blocks) if content else blocks)

    def opening(self, tool_name: str | None) -> str:
        return _BEGIN + self.newline + ("" if tool_name is None else open_envelope(tool_name, _ARGUMENTS))
