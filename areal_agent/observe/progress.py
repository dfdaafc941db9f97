"""Shows a run to a person while it goes on, and where its time went at the end.

`Progress` takes phases, steps and notes. In a terminal it draws a live picture at the foot, with notes and finished
phases scrolling by above; into files and pipes it writes plain lines without colours. `time_table` and `advice` sum up
where the time of a run went and which config key to change.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_agent.observe.metrics import Row, Spent, untrained


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """The figures of one train step for a person. `engine` and `trainer` are shares of the step's time by activity."""

    step: int
    reward: float
    success: float  # of the trained rollouts, 0 to 1
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    engine: Mapping[str, float]
    trainer: Mapping[str, float]
    mfu: float | None = None  # of the trainer, on a GPU that is known
    untrained: str = ""  # what was dropped or masked

    @classmethod
    def of(cls, row: Row) -> Self:
        """Return the figures of a step's row."""
        engine, trainer = Spent.of([row]).shares()
        return cls(
            step=row["step"],
            reward=row["reward/mean"],
            success=row["reward/success"],
            generated_tokens_per_s=row["tokens_per_s/generated"],
            trained_tokens_per_s=row["tokens_per_s/trained"],
            staleness_mean=row["staleness/mean"],
            staleness_max=row["staleness/max"],
            engine=engine,
            trainer=trainer,
            mfu=row.get("trainer/mfu"),
            untrained=untrained(row),
        )


WAITING = ("waiting_for_", "paused_for_")
LEAST_SHARE = 0.005
"""The smallest share that is shown: less would be written as 0%."""


def words(activity: str) -> str:
    """Return `waiting_for_agents` as a person writes it."""
    return activity.replace("_", " ")


def clock_time(seconds: float) -> str:
    """Return seconds as a clock shows them.

    >>> clock_time(75.4), clock_time(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeLeft:
    """Estimates the time left from the median of the last steps, so that one slow step has little effect."""

    WINDOW = 10

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._durations_s: list[float] = []
        self._since_s: float | None = None

    def start(self, now_s: float) -> None:
        """Note that the next step begins now."""
        self._since_s = now_s

    def step(self, step: int, now_s: float) -> float | None:
        """Note that `step` is done; return the seconds left after it, or None while no step's duration is known."""
        if self._since_s is not None:
            self._durations_s = [*self._durations_s, now_s - self._since_s][-self.WINDOW :]
        self._since_s = now_s
        if not self._durations_s:
            return None
        return statistics.median(self._durations_s) * max(0, self._total_steps - step)


BARS = "▁▂▃▄▅▆▇█"
NUM_BARS = 24
REFRESH_PER_S = 2.0  # the bar shares its cores with the run


class LiveDisplay:
    """Owns the foot of the terminal and rich's refreshing thread, from its first phase or step until `close`."""

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
        steps = self._steps or _Steps(self._total_steps)
        steps.add(view, left_s)
        self._steps = steps  # only now: the refreshing thread draws it
        self._live.start(refresh=True)
        self._live.refresh()

    def note(self, text: str) -> None:
        if self._phase is not None and self._phase.fraction == 1.0:
            self._end_phase()
        self._console.print(text, markup=False)

    def close(self) -> None:
        """End the live picture; the last picture of the steps stays on the screen."""
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

    def add(self, view: StepView, left_s: float | None) -> None:
        self._rewards = [*self._rewards, view.reward][-NUM_BARS:]
        self._successes = [*self._successes, view.success][-NUM_BARS:]
        self._view, self._left_s, self._told_s = view, left_s, time.monotonic()

    def __rich__(self) -> Group:
        return Group(self._bar(self._view), self._numbers(self._view))

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
        table.add_column(style="dim", no_wrap=True, min_width=11)  # in a narrow terminal only the last column shrinks
        table.add_column(justify="right", no_wrap=True, min_width=14)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row("  reward", f"{view.reward:.3f}", Text(sparkline(self._rewards), style="green"))
        table.add_row("  success", f"{view.success:.3f}", Text(sparkline(self._successes), style="green"))
        table.add_row("  staleness", f"{view.staleness_mean:.1f}", Text(f"at most {view.staleness_max}"))
        table.add_row("  engine", f"{view.generated_tokens_per_s:,.0f} tokens/s", _shares(view.engine))
        table.add_row("  trainer", f"{view.trained_tokens_per_s:,.0f} tokens/s", _shares(view.trainer))
        if view.mfu is not None:
            table.add_row("  MFU", f"{view.mfu:.2f}", Text("of the trainer's updates"))
        if view.untrained:
            table.add_row("  untrained", "", Text(view.untrained, style="yellow"))
        return table


def sparkline(values: list[float]) -> str:
    """Return values as bars between the lowest and the highest of them, 0 and 1 included.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def _shares(shares: Mapping[str, float]) -> Text:
    """Return `generating 72% · waiting for agents 18%`, biggest first, waiting in yellow."""
    text = Text()
    for activity, share in sorted(shares.items(), key=lambda one: -one[1]):
        if share >= LEAST_SHARE:
            text.append(" · " if text else "", style="dim")
            text.append(f"{words(activity)} {share:.0%}", style="yellow" if activity.startswith(WAITING) else "")
    return text


HEADER = "   step    reward  success    staleness  sampled/s  trained/s  engine waits     trainer waits      left"


class PlainDisplay:
    """Writes lines to `stream` and flushes each. Without a stream it shows nothing."""

    def __init__(self, total_steps: int, stream: TextIO | None) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._phase = ""
        self._quarters_told = 0  # of the phase
        self._has_header = False

    def phase(self, name: str) -> None:
        self._phase, self._quarters_told, self._has_header = name, 0, False
        self.note(f"{name} ...")

    def phase_progress(self, fraction: float, text: str) -> None:
        """Write one line for each quarter that is done."""
        quarters = int(fraction * 4)
        if quarters > self._quarters_told:
            self._quarters_told = quarters
            self.note(f"{self._phase} ... {quarters * 25:3}%  {text}".rstrip())

    def step(self, view: StepView, left_s: float | None) -> None:
        if not self._has_header:
            self._has_header = True
            self.note(HEADER)
        self.note(
            f"{f'{view.step}/{self._total_steps}':>7} {view.reward:9.3f} {view.success:8.3f} "
            f"{f'{view.staleness_mean:.1f} max {view.staleness_max}':>12} "
            f"{view.generated_tokens_per_s:10,.0f} {view.trained_tokens_per_s:10,.0f}  "
            f"{_wait(view.engine):<16} {_wait(view.trainer):<16} {'-' if left_s is None else clock_time(left_s):>6}"
            + (f"  MFU {view.mfu:.2f}" if view.mfu is not None else "")
            + (f"  {view.untrained}" if view.untrained else "")
        )

    def note(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _wait(shares: Mapping[str, float]) -> str:
    """Return the activity that a side waited for most, and its share; a dash when it did not wait.

    >>> _wait({"generating": 0.7, "waiting_for_agents": 0.2, "paused_for_push": 0.1})
    ' 20% agents'
    """
    share, activity = max(
        ((share, name) for name, share in shares.items() if name.startswith(WAITING)), default=(0, "")
    )
    return f"{share:4.0%} {words(activity.partition('_for_')[2])}" if share >= LEAST_SHARE else "-"


Mode = Literal["auto", "plain", "none"]


class Progress:
    """The progress of a run. `auto` is live in a terminal and plain lines elsewhere; `none` shows nothing.

    ::

        progress = Progress(total_steps=25)
        progress.phase("evaluating before")
        progress.phase_progress(0.5, "100/200 tasks")
        progress.step(view)                          # ends the phase
        progress.note("checkpoint saved")
        progress.close()                             # gives the terminal back
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        *,
        mode: Mode = "auto",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        out = sys.stdout if stream is None else stream
        is_live = mode == "auto" and out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        plain = PlainDisplay(total_steps, None if mode == "none" else out)
        self._display = LiveDisplay(total_steps, out) if is_live else plain
        self._time_left = TimeLeft(total_steps)
        self._now = now

    def phase(self, name: str) -> None:
        """Begin work other than steps; it ends with the next phase or step."""
        self._time_left.start(self._now())
        self._display.phase(name)

    def phase_progress(self, fraction: float, text: str = "") -> None:
        """Report the share of the phase that is done, 0 to 1, and in words."""
        self._time_left.start(self._now())
        self._display.phase_progress(fraction, text)

    def step(self, view: StepView) -> None:
        """Report a train step that is done."""
        self._display.step(view, self._time_left.step(view.step, self._now()))

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._display.note(text)

    def close(self) -> None:
        """Give the terminal back. Harmless when closed before."""
        self._display.close()


WORTH_ADVICE = 0.2
"""The share of the time from which a wait is worth a change of the config."""


def time_table(spent: Spent) -> str:
    """Return both sides in columns, the longest activities first, without those of less than half a percent.

    >>> engine = {"generating": 6.0, "waiting_for_agents": 4.0}
    >>> print(time_table(Spent(wall_s=10.0, engine=engine, trainer={"training": 10.0})))
    where 10 s went:  engine                       trainer
                       60%  generating             100%  training
                       40%  waiting for agents
    """
    title = f"where {spent.wall_s:.0f} s went:"
    engine, trainer = spent.shares()
    sides = (_column("engine", engine), _column("trainer", trainer))
    lines = [
        f"{title if number == 0 else '':<{len(title)}}  {engine:<27}  {trainer}".rstrip()
        for number, (engine, trainer) in enumerate(zip_longest(*sides, fillvalue=""))
    ]
    return "\n".join(lines)


def _column(title: str, shares: Mapping[str, float]) -> list[str]:
    longest = sorted(((share, name) for name, share in shares.items()), reverse=True)
    return [title, *(f"{share:4.0%}  {words(name)}" for share, name in longest if share >= LEAST_SHARE)]


SATURATED = 1.0
SATURATED_REMEDY = (
    "every core of this machine is busy, so more threads or rollouts would not help; try more cores, or smaller work "
    "(fewer rollout tokens, a smaller model)"
)


def advice(steps: Spent, *, engine_threads: int = 1, is_online: bool = False, load: float = 0.0) -> str:
    """Return the first thing to change, judged by where the time of the train steps went.

    When the trainer waits for rollouts, the cause is on the engine's side; when it hardly waits, the trainer is the
    limit. Online the agents and the engine are somebody else's. `load`: runnable tasks of this machine for each of its
    cores; from 1 on, more threads or rollouts at once would only take time from each other.
    """
    if steps.wall_s <= 0:
        return ""
    engine, trainer = steps.shares()
    waited = trainer.get("waiting_for_rollouts", 0.0)
    if trainer.get("saving", 0.0) >= WORTH_ADVICE:
        return f"saving took {trainer['saving']:.0%} of the time of the steps: try a larger trainer.checkpoint_every"
    if waited >= WORTH_ADVICE:
        cause, remedy = _cause_of_waiting(engine, is_online=is_online)
        if load >= SATURATED and not is_online:
            remedy = SATURATED_REMEDY
        return f"in the steps the trainer waited {waited:.0%} of the time for rollouts, {cause}: {remedy}"
    if engine.get("waiting_for_admission", 0.0) >= WORTH_ADVICE:
        return f"in the steps the engine waited {engine['waiting_for_admission']:.0%} of the time for the trainer: " + (
            f"try more trainer.threads{', or fewer engine.threads' if engine_threads > 1 else ''}"
            if load < SATURATED
            else SATURATED_REMEDY
        )
    return "in the steps neither side waited much for the other"


def _cause_of_waiting(engine: Mapping[str, float], *, is_online: bool) -> tuple[str, str]:
    """Return what most of the engine's time went to, and what would help."""
    causes = {
        "generating": ("while the engine generated", "try a faster engine, or a larger max_staleness"),
        "evaluating": ("while the engine evaluated", "try a larger eval.every"),
        "waiting_for_agents": (
            "while the engine waited for agents and their tools",
            "try more agents at once, or a larger max_staleness"
            if is_online
            else "try more rollouts at once (rollout.max_concurrent), or a larger max_staleness",
        ),
        "waiting_for_admission": ("while the staleness bound let none run", "try a larger max_staleness"),
        "waiting_for_gateway": (
            "while requests were on their way",
            "try agents nearer to the gateway" if is_online else "try more rollout.workers",
        ),
        "paused_for_push": ("while a push held the engine", "try larger steps (batch_size)"),
    }
    return causes[max(causes, key=lambda name: engine.get(name, 0.0))]
