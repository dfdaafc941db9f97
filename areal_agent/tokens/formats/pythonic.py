"""Tool calls as a list of Python calls with keyword arguments: Llama 4, and LFM2 between tags.

::

    [python(code="print(6 * 7)"), python(code="1")]
    <|tool_call_start|>[python(code="print(6 * 7)")]<|tool_call_end|>

Without a tag, an answer that begins with `[` may also be other text; a name and a parenthesis show that it is a call.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.tokens.formats.base import Marks, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import SPACE, Cursor
from areal_agent.tokens.formats.literals import Literals

_NAME = re.compile(r"[\w.]*")
_PYTHON = Literals()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pythonic:
    """The tags of one of the models."""

    begin: str
    end: str
    is_bare: bool  # models leave out the tags

    @property
    def marks(self) -> Marks:
        return Marks(
            openings=(self.begin,),
            closing=")",
            bare_openings=("[",) if self.is_bare else (),
            separators=(",",),
            endings=("]", self.end),
        )

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == self.begin:
            cursor.expect("[")
        cursor.take(SPACE)
        call.set_name(cursor.take(_NAME))
        cursor.expect("(")
        arguments: dict[str, Any] = {}
        separator = cursor.accept(")")
        while separator != ")":
            cursor.take(SPACE)
            name = cursor.take(_NAME)
            cursor.expect("=")
            call.has_arguments = True
            arguments[name] = _PYTHON.read(cursor)
            separator = cursor.expect(",", ")")
            if separator == ",":
                separator = cursor.accept(")")  # after the last comma
        call.set_arguments(arguments)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        tags = ("", "") if self.is_bare and not content else (self.begin, self.end)
        return f"{content}{tags[0]}[{', '.join(map(self._write_call, calls))}]{tags[1]}"

    def _write_call(self, call: ToolCall) -> str:
        for name in (call.name, *call.arguments):
            if not name or not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a name in Python")
        return f"{call.name}({', '.join(f'{key}={_PYTHON.write(value)}' for key, value in call.arguments.items())})"

    def opening(self, tool_name: str | None) -> str:
        return ("" if self.is_bare else self.begin) + "[" + ("" if tool_name is None else f"{tool_name}(")


LLAMA_4 = Pythonic(begin="<|python_start|>", end="<|python_end|>", is_bare=True)
LFM_2 = Pythonic(begin="<|tool_call_start|>", end="<|tool_call_end|>", is_bare=False)
