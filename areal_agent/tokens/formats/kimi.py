"""Tool calls as Kimi K2 writes them. A call has an id, which begins with the function and ends with a count.

::

    <|tool_calls_section_begin|><|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>{"code": "6 * 7"}
    <|tool_call_end|><|tool_calls_section_end|>

The count goes on through the conversation, and templates write the id into later prompts; so the agent gets it as the
call's id, and sends it back.
"""

import re
from collections.abc import Sequence

from areal_agent.tokens.formats.base import BARE_NAME, Marks, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import SPACE, Cursor, MalformedCall

_SECTION_BEGIN, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


class Kimi:
    """Writes all calls of an answer in one section."""

    marks = Marks(openings=(_SECTION_BEGIN,), closing=_END, separators=(_BEGIN,), endings=(_SECTION_END,))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == _SECTION_BEGIN:
            cursor.expect(_BEGIN)
        cursor.take(SPACE)
        call.id = cursor.take(BARE_NAME)
        found = _ID.fullmatch(call.id)
        if found is None:
            raise MalformedCall
        call.set_name(found["name"])
        cursor.expect(_ARGUMENTS)
        cursor.expect("{")
        call.read_arguments(cursor)
        cursor.expect(_END)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        written = (
            f"{_BEGIN}functions.{call.name}:{count}{_ARGUMENTS}{call.arguments_json}{_END}"
            for count, call in enumerate(calls)
        )
        return content + _SECTION_BEGIN + "".join(written) + _SECTION_END

    def opening(self, tool_name: str | None) -> str:
        return f"{_SECTION_BEGIN}{_BEGIN}functions." + ("" if tool_name is None else f"{tool_name}:")
