"""Tool calls as Hermes, Qwen and many others write them.

::

    Let me compute that.
    <tool_call>
    {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    </tool_call>
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.dialect import Marks
from areal_agent.tokens.answers.envelope import open_envelope, read_envelope, write_envelope
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.tokens.answers.tape import Steps, Tape

BEGIN, END = "<tool_call>", "</tool_call>"
_ARGUMENTS = "arguments"
_MARKS = Marks(openings=(BEGIN,), closings=(END,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Hermes:
    """`newline` is what stands between the tags and the call, and between calls, when written; all is read."""

    newline: str

    @property
    def marks(self) -> Marks:
        return _MARKS

    def read_call(self, tape: Tape, call: OpenCall, opening: str) -> Steps[None]:
        yield from tape.expect("{")
        yield from read_envelope(tape, call, argument_keys=(_ARGUMENTS,))
        yield from tape.expect(END)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        blocks = (self.newline.join((BEGIN, write_envelope(call, _ARGUMENTS), END)) for call in calls)
        return self.newline.join((content, *blocks) if content else blocks)

    def opening(self, tool_name: str | None) -> str:
        return BEGIN + self.newline + ("" if tool_name is None else open_envelope(tool_name, _ARGUMENTS))
