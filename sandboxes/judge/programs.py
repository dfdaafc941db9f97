"""Judges a program by texts and by calls: one process per case, all in one sandbox that holds only the program.

The host keeps the expected outputs and compares. A few cases run at once, and a case that fails does not affect the
others.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_agent.errors import SandboxError
from sandboxes import Limits, Pool, Sandbox, SandboxSpec
from sandboxes.judge.checkers import Checker, CustomChecker, CustomChecks
from sandboxes.judge.languages import Language
from sandboxes.judge.verdict import (
    SKIPPED,
    CallCase,
    CaseVerdict,
    Outcome,
    StdinCase,
    Verdict,
    ending_of,
    failure_of,
    shortened,
    skip_after_first_failure,
)
from sandboxes.spec import ExecResult

Answer = TypeVar("Answer")


CASES_AT_ONCE = 4
CANNOT_BE_RUN = (126, 127)
"""Exit codes of a command that is missing or cannot be executed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The source of a program, and the sandbox that it runs in."""

    box: Sandbox
    language: Language
    source: str

    async def build(self) -> ExecResult | None:
        """Put the program into its sandbox and compile it; None when there is nothing to compile."""
        if self.language.run is not None:
            await self.box.write(self.language.file, self.source.encode(errors="replace"))
        if self.language.build is None:
            return None
        return await self.box.exec(self.language.build, limits=self.language.build_limits)

    async def run(self, stdin: bytes, limits: Limits | None) -> ExecResult:
        if self.language.run is None:
            return await self.box.exec_python(self.source, stdin=stdin, limits=limits)
        return await self.box.exec(self.language.run, stdin=stdin, limits=limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramJudge:
    """A judge of one submission; `judge` returns the verdict."""

    pool: Pool
    spec: SandboxSpec
    language: Language
    code: str
    checker: Checker | CustomChecker
    limits: Limits | None
    stop_early: bool

    async def judge(self, cases: Sequence[StdinCase | CallCase]) -> Verdict:
        async with AsyncExitStack() as stack:
            program = Program(
                box=await stack.enter_async_context(self.pool.acquire(self.spec)),
                language=self.language,
                source=self._source_for(cases),
            )
            built = await program.build()
            if built is not None and not built.is_ok:
                await self._require_language(built.exit_code in CANNOT_BE_RUN)
                return Verdict(cases=(not_built(built),) * len(cases))
            score = await self._scorer(stack)

            async def judge_one(case: StdinCase | CallCase) -> CaseVerdict:
                result = await program.run(self._stdin_of(case), case.limits or self.limits)
                return await score(case, result) if result.is_ok else failure_of(result)

            verdicts = await judge_in_turn(cases, judge_one, stop_early=self.stop_early)
        await self._require_language(built is None and all(is_suspect(verdict) for verdict in verdicts))
        return Verdict(cases=verdicts)

    def _source_for(self, cases: Sequence[StdinCase | CallCase]) -> str:
        if not any(isinstance(case, CallCase) for case in cases):
            return self.code
        if not all(isinstance(case, CallCase) for case in cases):
            raise ValueError("cases are of two kinds; give StdinCase only, or CallCase only")
        if self.language.call is None:
            raise ValueError(f"{self.language.name} has no way to call a function; give StdinCase, or Language.call")
        return self.language.call

    def _stdin_of(self, case: StdinCase | CallCase) -> bytes:
        if isinstance(case, StdinCase):
            return case.stdin.encode()
        return json.dumps({"code": self.code, "function": case.function, "args": list(case.args)}).encode()

    async def _scorer(
        self, stack: AsyncExitStack
    ) -> Callable[[StdinCase | CallCase, ExecResult], Awaitable[CaseVerdict]]:
        """Return the function that judges the result of a program that ended well."""
        checker = self.checker
        if not isinstance(checker, CustomChecker):

            async def compare(case: StdinCase | CallCase, result: ExecResult) -> CaseVerdict:
                return compared(case, result, checker)

            return compare
        checks = await stack.enter_async_context(aclosing(CustomChecks(checker, self.pool.acquire(self.spec))))

        async def check(case: StdinCase | CallCase, result: ExecResult) -> CaseVerdict:
            if isinstance(case, StdinCase):
                score = await checks.score(case.stdin, case.expected, result.stdout)
            else:
                score = await checks.score(json.dumps(list(case.args)), json.dumps(case.expected), result.stdout)
            return scored(score, result)

        return check

    async def _require_language(self, is_in_doubt: bool) -> None:
        """Raise SandboxError when not even the smallest program runs: then the submission is not at fault.

        It runs in a fresh sandbox, so that no submission can pass off its failure as ours.
        """
        if not is_in_doubt or self.language.run is None:
            return
        async with self.pool.acquire(self.spec) as box:
            smallest = Program(box=box, language=self.language, source=self.language.smallest)
            result = await smallest.build()
            if result is None or result.is_ok:
                result = await smallest.run(b"", self.limits)
        if not result.is_ok or result.stdout.strip() != b"ok":
            raise SandboxError(
                f"{self.language.name} does not run in this sandbox ({result.status.value}: "
                f"{ending_of(result.stderr)!r}); use an image that has it, or allow more memory"
            )


async def judge_in_turn(
    cases: Sequence[StdinCase | CallCase],
    judge_one: Callable[[StdinCase | CallCase], Awaitable[CaseVerdict]],
    *,
    stop_early: bool,
) -> tuple[CaseVerdict, ...]:
    """Judge a few cases at once; the verdicts do not depend on which of them ends first."""
    slots = asyncio.Semaphore(CASES_AT_ONCE)  # wakes its waiters in order
    has_failed = False

    async def one(case: StdinCase | CallCase) -> CaseVerdict:
        nonlocal has_failed
        async with slots:
            if stop_early and has_failed:
                return SKIPPED
            verdict = await judge_one(case)
            has_failed = has_failed or not verdict.is_passed
            return verdict

    verdicts = await all_or_first_error([one(case) for case in cases])
    return skip_after_first_failure(verdicts) if stop_early else tuple(verdicts)


async def all_or_first_error(work: Sequence[Awaitable[Answer]]) -> list[Answer]:
    """Return every answer; when one fails, cancel the others and raise its own error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(one)) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _awaited(work: Awaitable[Answer]) -> Answer:
    return await work


def compared(case: StdinCase | CallCase, result: ExecResult, checker: Checker) -> CaseVerdict:
    """Return the verdict on what a program printed or returned."""
    if isinstance(case, StdinCase):
        return scored(float(checker.accepts_text(result.stdout, case.expected)), result)
    if not result.stdout:
        return CaseVerdict(outcome=Outcome.CRASHED, detail="it ended before it returned", wall_s=result.wall_s)
    try:
        returned = parse_json(result.stdout)
    except (ValueError, RecursionError):
        return scored(0.0, result)
    return scored(float(checker.accepts_data(returned, case.expected)), result)


def scored(score: float, result: ExecResult) -> CaseVerdict:
    return CaseVerdict(
        outcome=Outcome.PASSED if score == 1.0 else Outcome.WRONG,
        score=score,
        output=shortened(result.stdout),
        detail=ending_of(result.stderr),
        wall_s=result.wall_s,
    )


def not_built(result: ExecResult) -> CaseVerdict:
    return CaseVerdict(outcome=Outcome.NOT_BUILT, detail=ending_of(result.stderr) or result.status.value)


def is_suspect(verdict: CaseVerdict) -> bool:
    """Return whether the program did not even run to its end."""
    return verdict.outcome not in (Outcome.PASSED, Outcome.WRONG, Outcome.SKIPPED)


def parse_json(text: bytes) -> Any:
    """Parse strict JSON, without NaN and infinities. Raises ValueError or RecursionError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)
