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
        """A failure. The errors of this project have their remedy behind the last semicolon of their first line.

        Of a process that died, the last line of its log says why: most often such an error.
        """
        first, _, rest = str(error).partition("\n")
        found, semicolon, change = first.rpartition("; ")
        if not semicolon:
            found, change = first or type(error).__name__, ""
        if rest.strip():
            last = rest.strip().splitlines()[-1].strip()
            cause, semicolon, change = last.rpartition("; ") if last.startswith("error: ") else (last, "", "")
            found = f"{found}\n{cause if semicolon else last}"
        return cls(check=check, state=State.FAIL, found=found, change=change)
