"""What a check of the doctor says: its state, what was found, and what to change. It knows no check."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class State(StrEnum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"  # a run starts; it may be slow, or not what was meant
    FAIL = "fail"  # a run would fail
    SKIP = "skip"  # not checked, and why


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the doctor's table.

    >>> Finding.of_error("ports", ValueError("engine.port = 80: it is in use; choose another")).change
    'choose another'
    """

    check: str
    state: State
    found: str
    change: str = ""

    @classmethod
    def of_error(cls, check: str, error: Exception) -> Self:
        """A failure. The errors of this project have their remedy behind the last semicolon of their first line."""
        first, _, rest = str(error).partition("\n")
        found, semicolon, change = first.rpartition("; ")
        last = rest.strip().splitlines()[-1:]  # of the log of a process that died: there it says why
        return cls(
            check=check,
            state=State.FAIL,
            found="\n".join([found if semicolon else first or type(error).__name__, *(line.strip() for line in last)]),
            change=change if semicolon else "",
        )
