"""What is said of a program: an outcome a case, and a reward that is always a finite number from 0 to 1."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sandboxes import ExecResult, Status

MAX_TEXT = 1_000
"""Characters of output and of detail that a verdict keeps a case."""


class Outcome(StrEnum):
    """How one case ended. PASSED alone is right."""

    PASSED = "passed"
    WRONG = "wrong"  # it ended well, and what it gave is not right
    CRASHED = "crashed"  # it failed by itself, or ended before it gave anything
    TIMEOUT = "timeout"
    MEMORY = "memory"
    PIDS = "pids"
    DISK = "disk"
    OUTPUT_LIMIT = "output_limit"
    NOT_BUILT = "not_built"  # it does not compile
    SKIPPED = "skipped"  # an earlier case failed, and `stop_early` was asked


OUTCOME_OF: dict[Status, Outcome] = {
    Status.NONZERO: Outcome.CRASHED,
    Status.SIGNALED: Outcome.CRASHED,
    Status.TIMEOUT: Outcome.TIMEOUT,
    Status.MEMORY: Outcome.MEMORY,
    Status.PIDS: Outcome.PIDS,
    Status.DISK: Outcome.DISK,
    Status.OUTPUT_LIMIT: Outcome.OUTPUT_LIMIT,
}
"""Of a program that did not end well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseVerdict:
    """One case. `output` and `detail` are for people and models to read; nothing is decided by them.

    >>> CaseVerdict(outcome=Outcome.WRONG, output="41").score
    0.0
    """

    outcome: Outcome
    score: float = 0.0  # from 0 to 1: a checker of the task's own may give a part
    output: str = ""  # what the program printed or returned; of a unit test, its name
    detail: str = ""  # what went wrong
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.score <= 1.0:
            raise ValueError(f"CaseVerdict.score is {self.score!r}; give a number from 0 to 1")

    @property
    def is_passed(self) -> bool:
        return self.outcome is Outcome.PASSED


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All cases, in their order.

    >>> right, wrong = CaseVerdict(outcome=Outcome.PASSED, score=1.0), CaseVerdict(outcome=Outcome.WRONG)
    >>> verdict = Verdict(cases=(right, wrong))
    >>> verdict.is_passed, verdict.reward, verdict.partial_reward
    (False, 0.0, 0.5)
    """

    cases: tuple[CaseVerdict, ...]

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError("a verdict without cases says nothing; give at least one")

    @property
    def is_passed(self) -> bool:
        return all(case.is_passed for case in self.cases)

    @property
    def num_passed(self) -> int:
        return sum(case.is_passed for case in self.cases)

    @property
    def reward(self) -> float:
        """1.0 when every case is passed, else 0.0."""
        return float(self.is_passed)

    @property
    def partial_reward(self) -> float:
        """The mean score of the cases."""
        return sum(case.score for case in self.cases) / len(self.cases)


def failure_of(result: ExecResult) -> CaseVerdict:
    """The verdict on a program that did not end well, whatever it printed."""
    return CaseVerdict(
        outcome=OUTCOME_OF[result.status],
        output=shortened(result.stdout),
        detail=ending_of(result.stderr) or str(result.status),
        wall_s=result.wall_s,
    )


def skip_after_first_failure(cases: Sequence[CaseVerdict]) -> tuple[CaseVerdict, ...]:
    """What `stop_early` says: the cases behind the first that failed count as not run, whether they were or not."""
    first = next((index for index, case in enumerate(cases) if not case.is_passed), len(cases))
    skipped = [replace(SKIPPED) for _ in cases[first + 1 :]]
    return (*cases[: first + 1], *skipped)


SKIPPED = CaseVerdict(outcome=Outcome.SKIPPED)


def shortened(output: bytes) -> str:
    """The beginning of what was printed, as text."""
    return output[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT]


def ending_of(output: bytes) -> str:
    """The end of what was printed, as text: a traceback ends with what went wrong."""
    return output[-4 * MAX_TEXT :].decode(errors="replace").strip()[-MAX_TEXT:]
