"""Tool calls as Gemma 4 and FunctionGemma write them: arguments like JSON, with a tag for quotes and bare keys.

::

    <|tool_call>call:python{code:<|"|>print(6 * 7)<|"|>}<tool_call|>
    <start_function_call>call:python{code:<escape>print(6 * 7)<escape>}<end_function_call>
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.formats.base import BARE_NAME, Marks, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import Cursor
from areal_agent.tokens.formats.literals import Literals


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma:
    """The tags of one of the models."""

    begin: str
    end: str
    quote: str

    @property
    def marks(self) -> Marks:
        return Marks(openings=(self.begin,), closing=self.end)

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        cursor.expect("call:")
        call.set_name(cursor.take(BARE_NAME))
        cursor.expect("{")
        call.set_arguments(self._literals.read_members(cursor, "}"))
        cursor.expect(self.end)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        written = (
            f"{self.opening(call.name)}{self._literals.write_members(dict(call.arguments))}}}{self.end}"
            for call in calls
        )
        return content + "".join(written)

    def opening(self, tool_name: str | None) -> str:
        return f"{self.begin}call:" + ("" if tool_name is None else f"{tool_name}{{")

    @property
    def _literals(self) -> Literals:
        return Literals(quote=self.quote)


GEMMA_4 = Gemma(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA = Gemma(begin="<start_function_call>", end="<end_function_call>", quote="<escape>")
