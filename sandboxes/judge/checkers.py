"""Checkers: they decide whether an output is right.

`Exact`, `SameLines` and `CloseNumbers` are pure functions of plain data (what `json.loads` makes), which can neither
act nor pretend. A boolean is not a number; 1 and 1.0 are the same number.

A `CustomChecker` is Python of the task's own, which runs in a sandbox that it never shares with the judged program. An
output that it fails on counts as wrong, since honest checkers fail on nonsense.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, cast

from sandboxes import Limits, Sandbox
from sandboxes.judge.languages import CALL
from sandboxes.judge.verdict import JsonValue, ending_of
from sandboxes.spec import ExecResult


class Checker(Protocol):
    """Compares what a program printed (text) or returned (data) with what was expected."""

    def accepts_text(self, output: bytes, expected: str) -> bool: ...

    def accepts_data(self, result: JsonValue, expected: JsonValue) -> bool:
        return same_data(result, expected)


@dataclass(frozen=True, slots=True)
class Exact(Checker):
    r"""Text must match byte for byte, data by value.

    >>> Exact().accepts_text(b"3\n", "3"), Exact().accepts_data([1, 2.0], [1, 2]), Exact().accepts_data(True, 1)
    (False, True, False)
    """

    def accepts_text(self, output: bytes, expected: str) -> bool:
        return output == expected.encode()


@dataclass(frozen=True, slots=True)
class SameLines(Checker):
    r"""Lines must have the same words; spacing within and at the end of lines, and trailing empty lines, do not matter.

    >>> SameLines().accepts_text(b"1  2 \n3\n\n", "1 2\n3"), SameLines().accepts_text(b"1\n2", "1 2")
    (True, False)
    """

    def accepts_text(self, output: bytes, expected: str) -> bool:
        return all(given == wanted for given, wanted in zip_longest(words_of(output), words_of(expected.encode())))


@dataclass(frozen=True, slots=True)
class CloseNumbers(Checker):
    """Like SameLines, but numbers may differ by `absolute` + `relative` * the expected one.

    An expected whole number, one that is written without a point, must be met, unless `whole_too` is set.

    >>> CloseNumbers().accepts_text(b"0.3333333", "0.33333333"), CloseNumbers().accepts_text(b"6.9999999", "7")
    (True, False)
    """

    absolute: float = 1e-6
    relative: float = 1e-6
    whole_too: bool = False

    def __post_init__(self) -> None:
        for tolerance in (self.absolute, self.relative):
            if not 0.0 <= tolerance < math.inf:
                raise ValueError(f"a tolerance of CloseNumbers is {tolerance!r}; give a finite number, 0 or more")

    def accepts_text(self, output: bytes, expected: str) -> bool:
        words = zip_longest(words_of(output), words_of(expected.encode()))
        return all(given == wanted or self._agree(number_of(given), number_of(wanted)) for given, wanted in words)

    def accepts_data(self, result: JsonValue, expected: JsonValue) -> bool:
        return same_data(result, expected, self._agree)

    def _agree(self, given: float | None, wanted: float | None) -> bool:
        if given is None or wanted is None:
            return False
        if given == wanted or (type(wanted) is int and not (self.whole_too and type(given) is float)):
            return given == wanted
        try:
            return math.isfinite(given) and abs(given - wanted) <= self.absolute + self.relative * abs(wanted)
        except OverflowError:  # an integer too large for a float
            return False


def same_data(given: Any, wanted: Any, agree: Callable[[float, float], bool] = operator.eq) -> bool:
    """Return whether two JSON values are the same, without recursion, since data may be nested very deep."""
    pending = [(given, wanted)]
    while pending:
        left, right = pending.pop()
        if type(left) in (int, float) and type(right) in (int, float):
            if not agree(left, right):
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


def words_of(output: bytes) -> Iterator[bytes]:
    """Yield the words and line ends, without trailing empty lines; lazily, since an output may be very long."""
    return (found.group() for found in WORD.finditer(output.rstrip()))


WORD = re.compile(rb"\S+|\n")
MAX_DIGITS = 400
"""No number that a program prints honestly is longer, and those that are need long to be read."""


def number_of(word: bytes | None) -> int | float | None:
    """Return the finite number that a word spells, as programs print numbers, or None.

    >>> number_of(b"-1.5e3"), number_of(b"1_0"), number_of(b"inf")
    (-1500.0, None, None)
    """
    if word is None or b"_" in word or len(word) > MAX_DIGITS:
        return None
    try:
        number = int(word) if word.lstrip(b"+-").isdigit() else float(word)
    except ValueError:
        return None
    return number if isinstance(number, int) or math.isfinite(number) else None


@dataclass(frozen=True, slots=True)
class CustomChecker:
    """Python that defines `check(stdin, expected, output)`, which takes three texts and returns True, False or a score.

    A score is a finite number from 0 to 1; only 1 passes. For calls, the texts are JSON: the arguments, the expected
    result, the result. A checker must not evaluate the output as Python: whatever runs there could write the score.

    >>> CustomChecker("def check(stdin, expected, output): return sorted(output) == sorted(expected)").limits is None
    True
    """

    source: str
    limits: Limits | None = None  # of one check; None: the pool's

    def __post_init__(self) -> None:
        try:
            tree = ast.parse(self.source)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the checker is not Python: {error}") from None
        if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
            raise ValueError("the checker defines no function check(stdin, expected, output)")
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree)}
        if evaluating := sorted(names & {"eval", "exec"}):
            raise ValueError(
                f"the checker uses {evaluating[0]}; read outputs with ast.literal_eval, json.loads or float"
            )


@dataclass(frozen=True, slots=True)
class CustomChecks:
    """Runs a custom checker, in a sandbox where no judged program ever is."""

    checker: CustomChecker
    box: Sandbox

    async def try_on(self, stdin: str, expected: str) -> None:
        """Raise ValueError unless the checker gives a score for an expected output."""
        tried = await self._check(stdin, expected, expected)
        if not tried.is_ok or score_of(tried.stdout) is None:
            why = ending_of(tried.stderr) or f"it ended as {tried.status.value} and gave {tried.stdout!r:.100}"
            raise ValueError(f"the checker gives no score for an expected output as output: {why}")

    async def score(self, stdin: str, expected: str, output: bytes) -> float:
        """Return a score from 0 to 1; 0 for a check that fails or returns anything else."""
        result = await self._check(stdin, expected, output.decode(errors="replace"))
        return (score_of(result.stdout) or 0.0) if result.is_ok else 0.0

    async def _check(self, stdin: str, expected: str, output: str) -> ExecResult:
        request = {"code": self.checker.source, "function": "check", "args": [stdin, expected, output]}
        return await self.box.exec_python(CALL, stdin=json.dumps(request).encode(), limits=self.checker.limits)


def score_of(said: bytes) -> float | None:
    """Return what a checker wrote as a score; None if it is not one.

    >>> score_of(b"true"), score_of(b"0.5"), score_of(b"NaN"), score_of(b"2"), score_of(b"[1]")
    (1.0, 0.5, None, None, None)
    """
    try:
        score = json.loads(said[:MAX_DIGITS])
    except (ValueError, RecursionError):
        return None
    return float(score) if isinstance(score, bool | int | float) and 0 <= score <= 1 else None
