"""Tool calls as objects between tags: Hermes, Qwen and many others; and in a list: Phi-4-mini, Granite 3.

::

    Let me compute that.
    <tool_call>
    {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    </tool_call>

    functools[{"name": "python", "arguments": {"code": "print(6 * 7)"}}]
    <|tool_call|>[{"name": "python", "arguments": {"code": "print(6 * 7)"}}]<|/tool_call|>
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


_WORD, _TAG, _TAG_END = "functools[", "<|tool_call|>", "<|/tool_call|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Writes `begin` before the calls of a list, and reads lists after either. Between tags one call needs no list."""

    begin: str

    marks = Marks(openings=(_WORD, _TAG), closing="}", separators=(",",), endings=("]", _TAG_END))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == _TAG:
            cursor.accept("[")
        cursor.expect("{")
        read_envelope(cursor, call, argument_keys=(_ARGUMENTS, "parameters"))

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        return f"{content}{self.begin}{', '.join(write_envelope(call, _ARGUMENTS) for call in calls)}]"

    def opening(self, tool_name: str | None) -> str:
        return self.begin + ("" if tool_name is None else open_envelope(tool_name, _ARGUMENTS))


PHI, GRANITE = Listed(begin=_WORD), Listed(begin=_TAG + "[")
