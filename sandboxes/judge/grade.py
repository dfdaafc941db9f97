"""`grade`: the reward that a program earns on its cases, with any pool.

Texts and calls are judged here, one process per case, all in one sandbox that holds only the program. The host keeps
the expected outputs and compares. A few cases run at once, and a case that fails does not affect the others.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from areal_agent.errors import SandboxError
from sandboxes import Isolation, Limits, Pool, Sandbox, SandboxSpec
from sandboxes.judge.checkers import Checker, CustomChecker, CustomChecks, SameLines
from sandboxes.judge.languages import PYTHON, Language, language_of
from sandboxes.judge.unit_tests import judge_unit_tests
from sandboxes.judge.verdict import (
    SKIPPED,
    CallCase,
    Case,
    Cases,
    CaseVerdict,
    Outcome,
    StdinCase,
    UnitTests,
    Verdict,
    ending_of,
    failure_of,
    shortened,
    skip_after_first_failure,
    told,
)
from sandboxes.spec import ExecResult

SAME_LINES = SameLines()
ANY_BOX = SandboxSpec()
CASES_AT_ONCE = 4
MAX_GROWTH = 32
"""A right result is at most so many times as long as the expected one, since its numbers may have more digits."""
CANNOT_BE_RUN = (126, 127)
"""Exit codes of a command that is missing or cannot be executed."""


async def grade(
    code: str,
    cases: Cases,
    *,
    pool: Pool,
    language: str | Language = "python",
    checker: Checker | CustomChecker = SAME_LINES,
    limits: Limits | None = None,
    spec: SandboxSpec = ANY_BOX,
    stop_early: bool = False,
) -> Verdict:
    """Run a program against cases, in fresh sandboxes of `pool` that start as `spec` says.

    `limits` apply to one case (None: the pool's); a case may have its own. With `stop_early` the cases after the first
    failure are skipped.

    Raises ValueError for cases that cannot be judged. Raises SandboxError when a sandbox fails, lacks the language, or
    would hold expected outputs where others can read them. Neither says anything about the program.
    """
    language = language_of(language)
    if isinstance(cases, UnitTests) or isinstance(checker, CustomChecker):
        _require_walls(pool)
    if isinstance(cases, UnitTests):
        if language is not PYTHON:
            raise ValueError(f"unit tests are judged in Python, not in {language.name}; give StdinCase or CallCase")
        return await judge_unit_tests(code, cases, pool=pool, spec=spec, limits=limits, stop_early=stop_early)
    if not isinstance(cases, Sequence) or not all(isinstance(case, StdinCase | CallCase) for case in cases):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise ValueError(f"cases is {told(cases)}; give a list of StdinCase or of CallCase, or UnitTests")
    if not cases:
        raise ValueError("cases is empty; give at least one")
    source = _source_for(cases, code, language)
    async with AsyncExitStack() as stack:
        program = Program(box=await stack.enter_async_context(pool.acquire(spec)), language=language, source=source)
        built = await program.build()
        if built is not None and not built.is_ok:
            if built.exit_code in CANNOT_BE_RUN:
                await _require_language(language, pool, spec, limits)
            detail = ending_of(built.stderr) or built.status.value
            return Verdict(cases=(CaseVerdict(outcome=Outcome.NOT_BUILT, detail=detail),) * len(cases))
        checks = checker
        if isinstance(checks, CustomChecker):
            checks = CustomChecks(checks, await stack.enter_async_context(pool.acquire(spec)))
            await checks.try_on(*texts_of(cases[0]))

        async def judge_one(case: Case) -> CaseVerdict:
            result = await program.run(_stdin_of(case, code), case.limits or limits)
            return await judged(case, result, checks) if result.is_ok else failure_of(result)

        verdicts = await judge_in_turn(cases, judge_one, stop_early=stop_early)
    ran_to_its_end = (Outcome.PASSED, Outcome.WRONG, Outcome.SKIPPED)
    if built is None and not any(case.outcome in ran_to_its_end for case in verdicts):
        await _require_language(language, pool, spec, limits)
    return Verdict(cases=verdicts)


def _require_walls(pool: Pool) -> None:
    """Refuse backends without walls: a program could read tests and checkers, which hold what is expected."""
    found = pool.capabilities()
    if not found.isolation.covers(Isolation.NAMESPACES):
        raise SandboxError(
            f"unit tests and custom checkers need walls, but the {found.backend} backend gives only "
            f"{found.isolation.value!r}: a program could read them; use a backend that isolates, or texts and calls"
        )


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


def _source_for(cases: Sequence[Case], code: str, language: Language) -> str:
    num_calls = sum(isinstance(case, CallCase) for case in cases)
    if not num_calls:
        return code
    if num_calls < len(cases):
        raise ValueError("cases are of two kinds; give StdinCase only, or CallCase only")
    if language.call is None:
        raise ValueError(f"{language.name} has no way to call a function; give StdinCase, or Language.call")
    return language.call


def _stdin_of(case: Case, code: str) -> bytes:
    if isinstance(case, StdinCase):
        return case.stdin.encode()
    return json.dumps({"code": code, "function": case.function, "args": list(case.args)}).encode()


async def _require_language(language: Language, pool: Pool, spec: SandboxSpec, limits: Limits | None) -> None:
    """Raise SandboxError when not even the smallest program runs: then the submission is not at fault.

    It runs in a fresh sandbox, so that no submission can pass off its failure as ours.
    """
    if language.run is None:
        return
    async with pool.acquire(spec) as box:
        smallest = Program(box=box, language=language, source=language.smallest)
        result = await smallest.build()
        if result is None or result.is_ok:
            result = await smallest.run(b"", limits)
    if not result.is_ok or result.stdout.strip() != b"ok":
        raise SandboxError(
            f"{language.name} does not run in this sandbox ({result.status.value}: "
            f"{ending_of(result.stderr)!r}); use an image that has it, or allow more memory"
        )


async def judge_in_turn(
    cases: Sequence[Case], judge_one: Callable[[Case], Awaitable[CaseVerdict]], *, stop_early: bool
) -> tuple[CaseVerdict, ...]:
    """Judge a few cases at once; the verdicts do not depend on which of them ends first."""
    slots = asyncio.Semaphore(CASES_AT_ONCE)  # wakes its waiters in order
    has_failed = False

    async def one(case: Case) -> CaseVerdict:
        nonlocal has_failed
        async with slots:
            if stop_early and has_failed:
                return SKIPPED
            verdict = await judge_one(case)
            has_failed = has_failed or not verdict.is_passed
            return verdict

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(case)) for case in cases]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    verdicts = tuple(task.result() for task in tasks)
    return skip_after_first_failure(verdicts) if stop_early else verdicts


async def judged(case: Case, result: ExecResult, checker: Checker | CustomChecks) -> CaseVerdict:
    """Return the verdict on what a program that ended well printed or returned."""
    stdin, expected = texts_of(case)
    if isinstance(checker, CustomChecks):
        score = await checker.score(stdin, expected, result.stdout)
    elif isinstance(case, StdinCase):
        score = float(checker.accepts_text(result.stdout, expected))
    elif not result.stdout:
        return CaseVerdict(outcome=Outcome.CRASHED, detail="it ended before it returned", wall_s=result.wall_s)
    elif len(result.stdout) > MAX_GROWTH * (len(expected) + 1):
        score = 0.0  # reading it could take long
    else:
        try:
            returned = json.loads(result.stdout, parse_constant=refuse)  # NaN and infinities
        except (ValueError, RecursionError):
            score = 0.0
        else:
            score = float(checker.accepts_data(returned, json.loads(expected)))
    return CaseVerdict(
        outcome=Outcome.PASSED if score == 1.0 else Outcome.WRONG,
        score=score,
        output=shortened(result.stdout),
        detail=ending_of(result.stderr),
        wall_s=result.wall_s,
    )


def texts_of(case: Case) -> tuple[str, str]:
    """Return what goes in and what is expected, as text; of calls, as JSON."""
    if isinstance(case, StdinCase):
        return case.stdin, case.expected
    return json.dumps(list(case.args)), json.dumps(case.expected)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
