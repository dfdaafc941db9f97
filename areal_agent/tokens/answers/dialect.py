"""What the reader must know of a form of tool calls. Each form is one file beside this one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.parsed import ToolCall
from areal_agent.tokens.answers.tape import Steps, Tape


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The texts that surround calls. None of them is the beginning of another."""

    openings: tuple[str, ...]  # wherever one stands in the content, a call begins
    closings: tuple[str, ...] = ()  # where a call that broke off ends, if not with the next opening or the answer
    bare_openings: tuple[str, ...] = ()  # a call may begin with one at the head of the content; so may other text
    separators: tuple[str, ...] = ()  # behind a call: another one begins
    endings: tuple[str, ...] = ()  # behind a call: the last one was read


class Dialect(Protocol):
    """A form of tool calls: how one is read, how several are written."""

    @property
    def marks(self) -> Marks: ...

    def read_call(self, tape: Tape, call: OpenCall, opening: str) -> Steps[None]:
        """Take one call, whose opening (or separator) has been taken, with its closing; raises MalformedCall."""
        ...

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        """An answer as the model would write it; `calls` is not empty."""
        ...

    def opening(self, tool_name: str | None) -> str:
        """The text that begins a call of this tool; None: of whichever the model names."""
        ...
