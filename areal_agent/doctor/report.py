"""How the doctor's findings are printed: a line each as soon as it is known, and a last one that sums them up."""

import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.status import Status
from rich.text import Text

from areal_agent.doctor.finding import Finding, State

STYLES: Mapping[State, str] = {State.OK: "green", State.WARN: "yellow", State.FAIL: "bold red", State.SKIP: "dim"}
STATE_WIDTH, CHECK_WIDTH, TEXT_WIDTH = 6, 14, 100


class Report:
    """The table as it grows. In a terminal it has colours, and says what is being looked at."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self.findings: list[Finding] = []

    def begin(self, what: str) -> None:
        """Something is being looked at, which may take a while."""
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(what)
            self._status.start()
        self._status.update(what)

    def add(self, finding: Finding) -> None:
        """One more line; what to change stands below what was found."""
        self.findings.append(finding)
        line = Text()
        line.append(f"{finding.state:{STATE_WIDTH}}", style=STYLES[finding.state])
        line.append(f"{finding.check:{CHECK_WIDTH}}")
        line.append(self._filled(finding.found))
        if finding.change:
            line.append(f"\n{' ' * (STATE_WIDTH + CHECK_WIDTH)}{self._filled(f'-> {finding.change}')}", style="bold")
        self._console.print(line)

    def skip(self, *checks: str, why: str) -> None:
        """These were not made."""
        for check in checks:
            self.add(Finding(check=check, state=State.SKIP, found=f"not checked: {why}"))

    def close(self) -> None:
        """Give the terminal back."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def sum_up(self) -> None:
        """How many there are of each state, and what a run would do."""
        self._console.print(f"\n{self._summary()}")

    def _summary(self) -> str:
        counts = Counter(finding.state for finding in self.findings)
        told = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
        if counts[State.FAIL]:
            return f"{told}: a run of this config would fail; mend what failed, from the top"
        return f"{told}: this config runs here" + (", with what is warned of" if counts[State.WARN] else "")

    @property
    def has_failed(self) -> bool:
        return any(finding.state is State.FAIL for finding in self.findings)

    def _filled(self, text: str) -> str:
        """In lines that fit behind the columns before it; none in a file, whose reader may search for it."""
        indent = " " * (STATE_WIDTH + CHECK_WIDTH)
        width = min(TEXT_WIDTH, self._console.width - len(indent)) if self._console.is_terminal else 10_000
        lines = [line for part in text.splitlines() for line in textwrap.wrap(part, max(20, width)) or [""]]
        return f"\n{indent}".join(lines)
