"""The cases that a program is judged by, and the verdict: an outcome per case, and a finite reward from 0 to 1.

Cases are texts in and out, calls with JSON in and out, or files of unit tests.
"""

import ast
import builtins
import json
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sandboxes import Limits, Status
from sandboxes.spec import ExecResult

MAX_TEXT = 1_000
"""The number of characters of output, and of detail, that a verdict keeps per case."""
TAKEN_MODULES = {*sys.stdlib_module_names, "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "sandboxes"}
TEST_FILE = re.compile(r"(.*/)?(test[^/]*|[^/]*_test)\.py", re.DOTALL)


class Outcome(StrEnum):
    """The outcome of one case. Only PASSED is right."""

    PASSED = "passed"
    WRONG = "wrong"  # it ended well, but its output is not right
    CRASHED = "crashed"  # it failed by itself, or ended before it gave a result
    TIMEOUT = "timeout"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    OUTPUT_LIMIT = "output_limit"
    NOT_BUILT = "not_built"  # it does not compile
    SKIPPED = "skipped"  # an earlier case failed, and `stop_early` was set


def outcome_of(status: Status) -> Outcome:
    """Return the outcome of a program that did not end as it should; exiting with 0 is no excuse."""
    has_crashed = status in (Status.OK, Status.NONZERO, Status.SIGNALED)
    return Outcome.CRASHED if has_crashed else Outcome(status.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict:
    """The verdict on one case. `output` and `detail` are for people and models to read; they decide nothing.

    >>> CaseVerdict(outcome=Outcome.WRONG, output="41").score
    0.0
    """

    outcome: Outcome
    score: float = 0.0  # from 0 to 1; a checker of the task's own may give partial credit
    output: str = ""  # what the program printed or returned; for a unit test, its name
    detail: str = ""  # what went wrong
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"CaseVerdict.score is {self.score!r}; give a number from 0 to 1")
        for name in ("output", "detail"):  # a program may give text that cannot be encoded
            object.__setattr__(self, name, getattr(self, name).encode(errors="replace").decode())

    @property
    def is_passed(self) -> bool:
        return self.outcome is Outcome.PASSED


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdicts on all cases, in order.

    >>> right, wrong = CaseVerdict(outcome=Outcome.PASSED, score=1.0), CaseVerdict(outcome=Outcome.WRONG)
    >>> verdict = Verdict(cases=(right, wrong))
    >>> verdict.is_passed, verdict.reward, verdict.partial_reward
    (False, 0.0, 0.5)
    """

    cases: tuple[CaseVerdict, ...]

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("Verdict.cases is empty; give at least one")

    @property
    def is_passed(self) -> bool:
        return all(case.is_passed for case in self.cases)

    @property
    def num_passed(self) -> int:
        return sum(case.is_passed for case in self.cases)

    @property
    def reward(self) -> float:
        """1.0 when every case passed, else 0.0."""
        return float(self.is_passed)

    @property
    def partial_reward(self) -> float:
        """The mean score of the cases."""
        return sum(case.score for case in self.cases) / len(self.cases)


SKIPPED = CaseVerdict(outcome=Outcome.SKIPPED)


def failure_of(result: ExecResult) -> CaseVerdict:
    """Return the verdict on a program that did not end well, whatever it printed."""
    return CaseVerdict(
        outcome=outcome_of(result.status),
        output=shortened(result.stdout),
        detail=ending_of(result.stderr) or str(result.status),
        wall_s=result.wall_s,
    )


def skip_after_first_failure(cases: Sequence[CaseVerdict]) -> tuple[CaseVerdict, ...]:
    """Mark the cases after the first failure as skipped, whether they ran or not, as `stop_early` asks."""
    first = next((index for index, case in enumerate(cases) if not case.is_passed), len(cases))
    return (*cases[: first + 1], *[SKIPPED] * len(cases[first + 1 :]))


def shortened(output: bytes) -> str:
    """Return the beginning of an output as text."""
    return output[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT]


def ending_of(output: bytes) -> str:
    """Return the end of an output as text: a traceback ends with what went wrong."""
    return output[-4 * MAX_TEXT :].decode(errors="replace").strip()[-MAX_TEXT:]


def told(value: Any) -> str:
    """Return a value in short, without making the whole text first: data from elsewhere may be a bomb.

    >>> told([["x" * 50] * 10**6] * 10**6)
    "[[...], [...], [...], [...], [...], [...], ...]"
    """
    try:
        return SHORT.repr(value)
    except ValueError:  # an integer with too many digits to be written
        return f"a {type(value).__name__}"


SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 2, 200, 200

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
    limits: Limits | None = None  # None: the limits of all cases


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """The call `function(*args)` must return `expected`; it is a function of the program or a method of its `Solution`.

    Arguments and result are JSON: a tuple counts as a list, a key of a dict as its text. A result that JSON cannot say,
    such as NaN, a set or JavaScript's undefined, equals nothing. Each call runs in a process of its own.

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
        for name in ("args", "expected"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"CallCase.{name} of {self.function} cannot be written as JSON: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTests:
    r"""Files of tests that import the program as `module`, for pytest: its own kind and unittest's, `async` too.

    The tests run in a sandbox where the program never comes. There `module` is a stand-in, which sends each call to
    the program's sandbox and brings its result back as plain data. sandboxes/judge/README.md says what a
    test may do with the program's objects; one that has the program judge itself fails.

    >>> UnitTests(files={"test_it.py": "from solution import add\ndef test_add(): assert add(1, 2) == 3"}).module
    'solution'
    """

    files: Mapping[str, str]  # by path; files named test*.py or *_test.py hold tests and may import the others
    module: str = "solution"

    def __post_init__(self) -> None:
        if not self.module.isidentifier() or self.module in TAKEN_MODULES:
            raise ValueError(f"UnitTests.module is {self.module!r}; give the name of a module of your own")
        if not self.test_files:
            raise ValueError(f"UnitTests.files are {sorted(self.files)}; name one of them test*.py or *_test.py")
        for path, source in self.files.items():
            if path.endswith(".py") and (line := line_with_is(source)):
                raise ValueError(
                    f"UnitTests.files[{path!r}], line {line}: `is` cannot see whether two objects are one, as "
                    "the program's are in another sandbox; compare by ==, or an attribute"
                )

    @property
    def test_files(self) -> list[str]:
        """The files that hold tests, in order."""
        return [path for path in self.files if TEST_FILE.fullmatch(path)]


def line_with_is(source: str) -> int:
    r"""Return the first line with an `is` between what is neither a constant nor begins with a built-in name, or 0.

    >>> line_with_is("assert f(1) is None\nassert type(2) is int\nassert f(1) is not f(2)")
    3
    """
    try:
        nodes = [*ast.walk(ast.parse(source))]
    except (SyntaxError, ValueError, RecursionError):  # reported when the tests are loaded
        return 0
    lines: list[int] = []
    for node in nodes:
        match node:
            case (
                ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[right])
                | ast.Call(func=ast.Attribute(attr="assertIs" | "assertIsNot"), args=[left, right, *_])
            ) if not any(is_plain(side) for side in (left, right)):
                lines.append(node.lineno)
            case _:
                pass
    return min(lines, default=0)


def is_plain(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or hasattr(builtins, ast.unparse(node).partition("(")[0])


Case = StdinCase | CallCase
Cases = Sequence[Case] | UnitTests
