"""What a program is judged by: texts in and out, or calls with JSON in and out. Data alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandboxes import Limits

JsonValue = Any
"""None, bool, int, float, str, list, and dict with str keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdinCase:
    """The program reads `stdin` and must print `expected`.

    >>> StdinCase(stdin="1 2", expected="3").limits is None
    True
    """

    stdin: str
    expected: str
    limits: Limits | None = None  # None: those of all cases


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """`function(*args)`, a function of the program or a method of its class `Solution`, must return `expected`.

    Arguments and result are JSON: a tuple counts as a list. Each call is in a process of its own.

    >>> CallCase(function="add", args=[1, 2], expected=3).function
    'add'
    """

    function: str
    args: Sequence[JsonValue]
    expected: JsonValue
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if not self.function.isidentifier():
            raise ValueError(f"CallCase.function is {self.function!r}; give the name of a function, without its class")


Cases = Sequence[StdinCase] | Sequence[CallCase]
