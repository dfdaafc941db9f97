"""When an output is right. Pure functions of plain data: what is compared here can neither act nor pretend.

Data is what `json.loads` makes. A truth value is no number; 1 and 1.0 are the same number.
"""

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, cast

from sandboxes.judge.cases import JsonValue


class Checker(Protocol):
    """Compares what a program gave with what was expected."""

    def accepts_text(self, output: bytes, expected: str) -> bool:
        """Whether what it printed is right."""
        ...

    def accepts_data(self, result: JsonValue, expected: JsonValue) -> bool:
        """Whether what it returned is right."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Byte for byte; of data, the same values.

    >>> Exact().accepts_text(b"3\\n", "3"), Exact().accepts_data([1, 2.0], [1, 2]), Exact().accepts_data(True, 1)
    (False, True, False)
    """

    def accepts_text(self, output: bytes, expected: str) -> bool:
        return output == expected.encode()

    def accepts_data(self, result: JsonValue, expected: JsonValue) -> bool:
        return same_data(result, expected, NumberCheck())


@dataclass(frozen=True, slots=True)
class SameLines:
    """The same words on the same lines: white space within and at the end of lines, and empty last lines, are free.

    >>> SameLines().accepts_text(b"1  2 \\n3\\n\\n", "1 2\\n3"), SameLines().accepts_text(b"1\\n2", "1 2")
    (True, False)
    """

    def accepts_text(self, output: bytes, expected: str) -> bool:
        return words_of(output) == words_of(expected.encode())

    def accepts_data(self, result: JsonValue, expected: JsonValue) -> bool:
        return same_data(result, expected, NumberCheck())


@dataclass(frozen=True, slots=True)
class CloseNumbers:
    """As SameLines, and numbers may differ by `absolute` and `relative` times the expected one, unless both are whole.

    >>> CloseNumbers().accepts_text(b"0.3333333", "0.33333333"), CloseNumbers().accepts_text(b"nan", "1.0")
    (True, False)
    """

    absolute: float = 1e-6
    relative: float = 1e-6

    def __post_init__(self) -> None:
        for tolerance in (self.absolute, self.relative):
            if not 0.0 <= tolerance < math.inf:
                raise ValueError(f"a tolerance of CloseNumbers is {tolerance!r}; give a finite number, 0 or more")

    def accepts_text(self, output: bytes, expected: str) -> bool:
        given, wanted = words_of(output), words_of(expected.encode())
        if len(given) != len(wanted):
            return False
        words = [pair for lines in zip(given, wanted, strict=True) for pair in zip_longest(*lines)]
        return all(given == wanted or self._close_words(given, wanted) for given, wanted in words)

    def accepts_data(self, result: JsonValue, expected: JsonValue) -> bool:
        return same_data(result, expected, NumberCheck(self.absolute, self.relative))

    def _close_words(self, given: bytes | None, wanted: bytes | None) -> bool:
        first, second = number_of(given), number_of(wanted)
        return None not in (first, second) and NumberCheck(self.absolute, self.relative).agrees(
            cast(float, first), cast(float, second)
        )


@dataclass(frozen=True, slots=True)
class NumberCheck:
    """When two numbers are the same. Whole numbers have no tolerance: a count is right or wrong."""

    absolute: float = 0.0
    relative: float = 0.0

    def agrees(self, given: float, wanted: float) -> bool:
        if given == wanted or (type(given) is int and type(wanted) is int):
            return given == wanted
        try:
            return math.isfinite(given) and abs(given - wanted) <= self.absolute + self.relative * abs(wanted)
        except OverflowError:  # an integer that no float holds
            return False


def same_data(given: Any, wanted: Any, numbers: NumberCheck) -> bool:
    """Whether two JSON values are the same. It does not recurse: data may be nested as deep as a parser lets it."""
    pending = [(given, wanted)]
    while pending:
        left, right = pending.pop()
        if is_number(left) and is_number(right):
            if not numbers.agrees(left, right):
                return False
        elif type(left) is not type(right):
            return False
        elif isinstance(left, list):
            if len(cast(list[Any], left)) != len(right):
                return False
            pending += zip(cast(list[Any], left), right, strict=True)
        elif isinstance(left, dict):
            left = cast(dict[str, Any], left)
            if left.keys() != right.keys():
                return False
            pending += [(value, right[key]) for key, value in left.items()]
        elif left != right:
            return False
    return True


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def words_of(output: bytes) -> list[list[bytes]]:
    """The words of each line, without empty last lines."""
    lines = [line.split() for line in output.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def number_of(word: bytes | None) -> int | float | None:
    """The finite number that a word is, as programs print numbers; None when it is none.

    >>> number_of(b"-1.5e3"), number_of(b"1_0"), number_of(b"inf")
    (-1500.0, None, None)
    """
    if word is None or b"_" in word:
        return None
    try:
        number = int(word) if word.lstrip(b"+-").isdigit() else float(word)
    except ValueError:
        return None
    return number if isinstance(number, int) or math.isfinite(number) else None
