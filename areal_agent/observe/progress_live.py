"""Progress as a live picture at the foot of a terminal; notes and finished phases scroll by above it."""

import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_agent.observe.step_view import LEAST_SHARE, WAITING, StepView, clock_time, words

BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 24
REFRESH_PER_S = 2.0  # the bar shares its cores with the run


class LiveDisplay:
    """Owns the foot of the terminal, and rich's refreshing thread, from its first phase or step until `close`."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total_steps = total_steps
        self._console = Console(file=stream, highlight=False)
        self._live = Live(self, console=self._console, refresh_per_second=REFRESH_PER_S, transient=True)
        self._phase: _Phase | None = None
        self._steps: _Steps | None = None

    def phase(self, name: str) -> None:
        self._end_phase()
        self._phase = _Phase(name)
        self._live.start(refresh=True)

    def phase_progress(self, fraction: float, text: str) -> None:
        if self._phase is not None:
            self._phase.fraction, self._phase.text = fraction, text

    def step(self, view: StepView, left_s: float | None) -> None:
        self._end_phase()
        if self._steps is None:
            self._steps = _Steps(self._total_steps)
        self._steps.add(view, left_s)
        self._live.start(refresh=True)
        self._live.refresh()

    def note(self, text: str) -> None:
        if self._phase is not None and self._phase.fraction == 1.0:
            self._end_phase()
        self._console.print(text, markup=False)

    def close(self) -> None:
        """The last picture of the steps stays on the screen."""
        self._end_phase()
        self._live.stop()
        if self._steps is not None:
            self._console.print(self._steps)
            self._steps = None

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._console.print(f"[green]✓[/] {self._phase.name}  [dim]{clock_time(self._phase.elapsed_s)}[/]")
            self._phase = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._steps is not None:
            yield self._steps
        if self._phase is not None:
            yield self._phase


class _Phase:
    """A spell of work before, between or after steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fraction: float | None = None
        self.text = ""
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def __rich__(self) -> Table:
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=1.0, completed=self.fraction or 0.0, width=28, pulse=self.fraction is None)
        row.add_row(Text(self.name, style="bold"), bar, self.text, Text(clock_time(self.elapsed_s), style="dim"))
        return row


class _Steps:
    """The picture of the steps so far: a bar, the curves, and what each side did in the last step."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._rewards: list[float] = []
        self._successes: list[float] = []
        self._view: StepView | None = None
        self._left_s: float | None = None
        self._told_s = 0.0

    def add(self, view: StepView, left_s: float | None) -> None:
        self._rewards = [*self._rewards, view.reward][-NUM_BARS:]
        self._successes = [*self._successes, view.success][-NUM_BARS:]
        self._view, self._left_s, self._told_s = view, left_s, time.monotonic()

    def __rich__(self) -> Group:
        view = self._view
        if view is None:
            return Group()
        return Group(self._bar(view), self._numbers(view))

    def _bar(self, view: StepView) -> Table:
        bar = Table.grid(padding=(0, 2))
        left = ""
        if self._left_s is not None and view.step < self._total_steps:
            left_s = max(0.0, self._left_s - (time.monotonic() - self._told_s))
            left = f"{clock_time(left_s)} left"
        bar.add_row(
            Text(f"step {view.step}/{self._total_steps}", style="bold"),
            ProgressBar(total=self._total_steps, completed=view.step, width=40),
            Text(left, style="cyan"),
        )
        return bar

    def _numbers(self, view: StepView) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=11)  # in a narrow terminal only the last column gives way
        table.add_column(justify="right", no_wrap=True, min_width=14)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row("  reward", f"{view.reward:.3f}", Text(sparkline(self._rewards), style="green"))
        table.add_row("  success", f"{view.success:.3f}", Text(sparkline(self._successes), style="green"))
        table.add_row("  staleness", f"{view.staleness_mean:.1f}", Text(f"at most {view.staleness_max}"))
        table.add_row("  engine", f"{view.generated_tokens_per_s:,.0f} tokens/s", _shares(view.engine))
        table.add_row("  trainer", f"{view.trained_tokens_per_s:,.0f} tokens/s", _shares(view.trainer))
        return table


def sparkline(values: list[float]) -> str:
    """Values as bars between the lowest and the highest of them, 0 and 1 included.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def _shares(shares: Mapping[str, float]) -> Text:
    """`generating 72% · waiting for agents 18%`, waiting in yellow, the biggest first."""
    text = Text()
    for activity, share in sorted(shares.items(), key=lambda one: -one[1]):
        if share >= LEAST_SHARE:
            text.append(" · " if text else "", style="dim")
            text.append(f"{words(activity)} {share:.0%}", style="yellow" if activity.startswith(WAITING) else "")
    return text
