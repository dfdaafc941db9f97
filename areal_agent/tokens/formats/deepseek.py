"""Tool calls as DeepSeek's models write them: with a code fence (V3, R1), or plain (since V3.1).

::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>python
    ```json
    {"code": "print(6 * 7)"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>python<｜tool▁sep｜>{"code": "1"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.formats.base import BARE_NAME, Marks, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import Cursor, MalformedCall

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TYPE = "function"
_FENCE_BEGIN, _FENCE_END = "```json", "```"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeek:
    """Writes the fenced form if `is_fenced`, else the plain form; reads both."""

    is_fenced: bool

    marks = Marks(openings=(_CALLS_BEGIN, _BEGIN), closing=_END, endings=(_CALLS_END,))

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == _CALLS_BEGIN:
            cursor.expect(_BEGIN)
        name = cursor.take(BARE_NAME)
        cursor.expect(_SEP)
        if cursor.accept("{"):
            call.set_name(name)
            call.read_arguments(cursor)
        elif name == _TYPE:
            call.set_name(cursor.take(BARE_NAME))
            cursor.expect(_FENCE_BEGIN)
            cursor.expect("{")
            call.read_arguments(cursor)
            cursor.expect(_FENCE_END)
        else:
            raise MalformedCall
        cursor.expect(_END)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        between = "\n" if self.is_fenced else ""
        return content + _CALLS_BEGIN + between.join(map(self._write_call, calls)) + _CALLS_END

    def _write_call(self, call: ToolCall) -> str:
        if self.is_fenced:
            return f"{self._begin(call.name)}\n{call.arguments_json}\n{_FENCE_END}{_END}"
        return f"{self._begin(call.name)}{call.arguments_json}{_END}"

    def opening(self, tool_name: str | None) -> str:
        if tool_name is None:
            return _CALLS_BEGIN + _BEGIN + (_TYPE + _SEP if self.is_fenced else "")
        return _CALLS_BEGIN + self._begin(tool_name)

    def _begin(self, name: str) -> str:
        return f"{_BEGIN}{_TYPE}{_SEP}{name}\n{_FENCE_BEGIN}" if self.is_fenced else f"{_BEGIN}{name}{_SEP}"
