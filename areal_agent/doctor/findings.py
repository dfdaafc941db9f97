"""Findings, their report, and the boundary that turns the failure of a check into a finding; sizes as text.

A finding is a line of the doctor's table: a state, what was found, and what to change. It is printed as soon as it is
known; a last line sums all up.
"""

import asyncio
import sys
import textwrap
from collections import Counter
from collections.abc import Awaitable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TextIO, TypeVar

from rich.console import Console
from rich.status import Status
from rich.text import Text

from areal_agent.errors import ArealAgentError
from areal_agent.observe.progress import Progress

T = TypeVar("T")

GIB = 2**30
MIB = 2**20


def gib(num_bytes: float) -> str:
    """Return a size as text.

    >>> gib(3 * GIB // 2), gib(5 * MIB)
    ('1.5 GiB', '5 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.0f} MiB"


class State(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"  # a run starts; it may be slow, or not what was meant
    FAIL = "fail"  # a run would fail
    SKIP = "skip"  # not checked, with the reason


@dataclass(frozen=True, slots=True)
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
        """Make a failure of an error.

        This project's errors have their remedy behind the last semicolon of their first line. When a process died, the
        last line of its log gives the cause, usually such an error.
        """
        first, _, rest = str(error).partition("\n")
        found, semicolon, change = first.rpartition("; ")
        if not semicolon:
            found, change = first or type(error).__name__, ""
        if rest.strip():
            last = rest.strip().splitlines()[-1].strip()
            cause, semicolon, change = last.rpartition("; ") if last.startswith("error: ") else (last, "", "")
            found = f"{found}\n{cause if semicolon else last}"
        return cls(check, State.FAIL, found, change)


STYLES: Mapping[State, str] = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red", State.SKIP: "dim"}
STATE_WIDTH, CHECK_WIDTH, TEXT_WIDTH = 6, 14, 100


class Report:
    """The table as it grows. In a terminal it has colours and shows what is being checked."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._is_lent = False
        self.findings: list[Finding] = []

    def begin(self, what: str) -> None:
        """Show that a check begins, which may take a while."""
        if not self._console.is_terminal or self._is_lent:
            return
        if self._status is None:
            self._status = self._console.status(what)
            self._status.start()
        self._status.update(what)

    def add(self, finding: Finding) -> None:
        """Print one more line, with the change below what was found."""
        self.findings.append(finding)
        line = Text()
        line.append(f"{finding.state:{STATE_WIDTH}}", style=STYLES[finding.state])
        line.append(f"{finding.check:{CHECK_WIDTH}}")
        line.append(self._filled(finding.found))
        if finding.change:
            line.append(f"\n{' ' * (STATE_WIDTH + CHECK_WIDTH)}{self._filled(f'-> {finding.change}')}", style="bold")
        self._console.print(line)

    def skip(self, *checks: str, why: str) -> None:
        """Report checks that were not made."""
        for check in checks:
            self.add(Finding(check, State.SKIP, f"not checked: {why}"))

    @contextmanager
    def progress(self) -> Generator[Progress]:
        """Lend the terminal to work of minutes, which shows how far it is."""
        self.close()
        self._is_lent, progress = True, Progress(total_steps=0, stream=self._stream)
        try:
            yield progress
        finally:
            progress.close()
            self._is_lent = False

    def close(self) -> None:
        """Give the terminal back."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def sum_up(self, place: str = "here") -> None:
        """Print the number of findings by state, and what a run would do, as far as it was tried."""
        counts = Counter(finding.state for finding in self.findings)
        untried = dict.fromkeys(finding.check for finding in self.findings if finding.state is State.SKIP)
        verdict = f"this config runs {place}" if not untried else f"no fault was found {place}"
        verdict += ", but see the warnings" if counts[State.WARN] else ""
        if self.has_failed:
            verdict = "a run of this config would fail; fix what failed, from the top"
        elif untried:
            verdict += f"\nnot tried, and may still fail: {', '.join(untried)}"
        self._console.print(f"\n{', '.join(f'{counts[state]} {state}' for state in State if counts[state])}: {verdict}")

    @property
    def has_failed(self) -> bool:
        return any(finding.state is State.FAIL for finding in self.findings)

    def _filled(self, text: str) -> str:
        """Wrap text into the last column of a terminal. In a file lines stay whole, so that they can be searched."""
        indent = " " * (STATE_WIDTH + CHECK_WIDTH)
        width = min(TEXT_WIDTH, self._console.width - len(indent)) if self._console.is_terminal else 10_000
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, max(20, width)) or [""]]
        return f"\n{indent}".join(lines)


CALL_S = 300.0
"""The time limit of one call to something else."""


async def attempt(report: Report, check: str, work: Awaitable[T], *, limit_s: float | None = CALL_S) -> T | None:
    """Return the result of `work`; None when it fails or takes longer than `limit_s`, which is reported."""
    report.begin(check)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except ArealAgentError as error:
        report.add(Finding.of_error(check, error))
    except Exception as error:  # foreign code: a user's tasks, a tokenizer, a template
        cause = " ".join(str(error).split())[:300]
        found = f"no answer within {limit_s:g} s" if limit.expired() else f"{type(error).__name__}: {cause}"
        report.add(Finding(check, State.FAIL, found))
    return None


async def examined(report: Report, check: str, work: Awaitable[list[Finding]]) -> None:
    """Report what a check finds, or its failure."""
    for finding in await attempt(report, check, work) or ():
        report.add(finding)


async def output_of(command: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Run a command; return its exit code, output and errors. It ends with this call, also when that is cancelled.

    Raises TimeoutError after `limit_s`, and OSError where it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), limit_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return await process.wait(), output.decode(errors="replace"), errors.decode(errors="replace")
