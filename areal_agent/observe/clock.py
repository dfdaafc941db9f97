"""Clocks that say where time goes, within one process, over several, and on the engine's side of a run.

    TimeAccount       every second belongs to exactly one named activity
    BusyClock         the seconds in which at least one of something was under way
    SpanLog           the same, with the spans, which a process keeps and sends
    SpanUnion         the seconds in which at least one of several processes was busy
    ClockShift        how far the clock of a process on another machine is behind
    engine_seconds    fits such clocks into wall time: every second of an engine belongs to one activity

Times are of the monotonic clock, which all processes of a machine share; a process elsewhere has its times shifted.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, fields

OTHER = "other"
"""The activity of time for which none was named."""


class TimeAccount:
    """Attributes all time since it was made to activities. Of nested activities, the innermost one counts.

    >>> now = iter([0.0, 1.0, 5.0, 7.0, 7.0, 10.0])
    >>> account = TimeAccount(now=lambda: next(now))
    >>> with account.during("training"):        # from 1.0 to 7.0
    ...     with account.during("saving"):      # from 5.0 to 7.0
    ...         pass
    >>> account.seconds()                       # at 10.0
    {'other': 4.0, 'training': 4.0, 'saving': 2.0}
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._settled_at = now()
        self._seconds: dict[str, float] = {}
        self._under_way: dict[object, str] = {}  # in the order of their beginnings

    @contextmanager
    def during(self, activity: str) -> Generator[None]:
        """Attribute the time inside to `activity`, except for nested activities."""
        mine = object()
        self._settle()
        self._under_way[mine] = activity
        try:
            yield
        finally:
            self._settle()
            del self._under_way[mine]

    def seconds(self) -> dict[str, float]:
        """Return seconds by activity until now. Their sum is the wall time since the account was made."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        """Attribute the time since the last call to the current activity."""
        now = self._now()
        activity = next(reversed(self._under_way.values()), OTHER)
        self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._settled_at
        self._settled_at = now


class BusyClock:
    """Counts how many of something are under way, the seconds in which at least one was, and the sum of their times.

    >>> now = iter([0.0, 1.0, 3.0, 3.0, 5.0])
    >>> clock = BusyClock(now=lambda: next(now))
    >>> with clock.one():                 # from 0.0 to 3.0
    ...     with clock.one():             # from 1.0 to 3.0
    ...         num_inside = clock.num_running
    >>> num_inside, clock.busy_s, clock.total_s
    (2, 3.0, 5.0)
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._busy_s = 0.0
        self._since = 0.0
        self._total_s = 0.0
        self._settled_at = 0.0
        self.num_running = 0

    @contextmanager
    def one(self) -> Generator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Count one more as under way, until its `end`."""
        now = self._settle()
        if self.num_running == 0:
            self._since = now
        self.num_running += 1

    def end(self) -> None:
        now = self._settle()
        self.num_running -= 1
        if self.num_running == 0:
            self._count(self._since, now)

    def _settle(self) -> float:
        """Add up the times of all that run until now, and return now."""
        now = self._now()
        self._total_s += self.num_running * (now - self._settled_at)
        self._settled_at = now
        return now

    def _count(self, start: float, end: float) -> None:
        self._busy_s += end - start

    @property
    def busy_s(self) -> float:
        return self._busy_s + (self._now() - self._since if self.num_running else 0.0)

    @property
    def total_s(self) -> float:
        """The sum of the times of all, those under way included; over the time that passed: how many ran on average."""
        if self.num_running:
            self._settle()
        return self._total_s


Span = tuple[float, float]
"""The start and the end, in seconds."""


class SpanLog(BusyClock):
    """A BusyClock that also keeps its spans, until they are taken.

    >>> now = iter([0.0, 2.0, 5.0, 6.0, 7.0])
    >>> log = SpanLog(now=lambda: next(now))
    >>> with log.one():                      # from 0.0 to 2.0
    ...     pass
    >>> with log.one():                      # from 5.0 on
    ...     spans = log.take()               # at 6.0
    >>> spans
    ([(0.0, 2.0), (5.0, 6.0)], 6.0)
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(now)
        self._ended: list[Span] = []

    def _count(self, start: float, end: float) -> None:
        super()._count(start, end)
        if end > start:
            self._ended.append((start, end))

    def take(self) -> tuple[list[Span], float]:
        """Return the spans not taken yet, and the time up to which they are complete, where a running span is cut."""
        now = self._now()
        if self.num_running:
            self._count(self._since, now)
            self._since = now
        taken, self._ended = self._ended, []
        return taken, now


class SpanUnion:
    """The seconds in which at least one of several sources was busy.

    Sources report at any time. Time that all of them have reported is folded into a number, so that memory does not
    grow.

    >>> union = SpanUnion()
    >>> union.join("a", since=0.0); union.join("b", since=0.0)
    >>> union.add("a", [(0.0, 4.0)], until=5.0)
    >>> union.add("b", [(3.0, 6.0)], until=7.0)
    >>> union.seconds
    6.0
    """

    def __init__(self) -> None:
        self._settled_s = 0.0
        self._open: list[Span] = []
        self._until: dict[object, float] = {}

    def join(self, source: object, since: float) -> None:
        """Add a source, which will report its spans from `since` on."""
        self._until[source] = since

    def leave(self, source: object) -> None:
        """Remove a source, which reports no more."""
        self._until.pop(source, None)
        self._settle()

    def add(self, source: object, spans: Iterable[Span], until: float) -> None:
        """Add the spans of `source` since its last report, complete up to `until`."""
        self._open = _united([*self._open, *spans])
        self._until[source] = until
        self._settle()

    @property
    def seconds(self) -> float:
        return self._settled_s + sum(end - start for start, end in self._open)

    def _settle(self) -> None:
        """Fold the time before the oldest of the sources' reports."""
        horizon = min(self._until.values(), default=float("inf"))
        self._settled_s += sum(min(end, horizon) - start for start, end in self._open if start < horizon)
        self._open = [(max(start, horizon), end) for start, end in self._open if end > horizon]


class ClockShift:
    """The seconds by which this process's clock is ahead of another's, from what that one told when it was asked.

    It changes only as far as the last answer requires: it stays 0 where both share a clock; otherwise it is wrong by at
    most the time between question and answer, and follows a clock that drifts.

    >>> same, other = ClockShift(), ClockShift()
    >>> same.told(5.0, asked_s=4.9, got_s=5.1), other.told(100.0, asked_s=1.0, got_s=3.0)
    (0.0, -97.0)
    """

    def __init__(self) -> None:
        self._shift_s = 0.0

    def told(self, time_s: float, *, asked_s: float, got_s: float) -> float:
        """Return the shift, now that the other clock showed `time_s` at some time from `asked_s` to `got_s` here."""
        self._shift_s = min(max(self._shift_s, asked_s - time_s), got_s - time_s)
        return self._shift_s


def _united(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as ordered spans that do not touch."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReading:
    """Seconds and tokens counted since some beginning, at one moment.

    `wall_s` counts all time; the other times are parts of it and overlap.
    """

    wall_s: float = 0.0
    starting_s: float = 0.0  # before the engine was there
    paused_s: float = 0.0  # held by a push
    busy_s: float = 0.0  # its model ran
    in_flight_s: float = 0.0  # at least one request was on its way to it, in it or on its way back
    rolling_s: float = 0.0  # at least one rollout was under way
    producing_s: float = 0.0  # rollouts were wanted: only the staleness bound holds them back
    generated_tokens: int = 0
    evaluated_tokens: int = 0  # those of generated_tokens that were in answers of an evaluation


def engine_seconds(since: EngineReading, until: EngineReading) -> dict[str, float]:
    """Return the time from `since` to `until` by activity: none is negative, and their sum is the wall time.

    Each activity gets time that the ones before it have left: a push holds the engine, whatever it was doing; else its
    model runs, and that time is split into generating and evaluating by their tokens; else requests are on their way
    (gateway); else rollouts are busy with their own work (agents); else the staleness bound lets none run (admission).
    Clocks of several processes are read one after the other, and one may restart: what does not fit is cut off.

    >>> now = EngineReading(wall_s=10.0, busy_s=4.0, in_flight_s=5.0, rolling_s=8.0)
    >>> seconds = engine_seconds(EngineReading(), now)
    >>> {name: spent for name, spent in seconds.items() if spent}
    {'generating': 4.0, 'waiting_for_gateway': 1.0, 'waiting_for_agents': 3.0, 'other': 2.0}
    """
    took = EngineReading(**{one.name: getattr(until, one.name) - getattr(since, one.name) for one in fields(until)})
    left = _Left(took.wall_s)
    starting_s, paused_s, busy_s = left.take(took.starting_s), left.take(took.paused_s), left.take(took.busy_s)
    evaluating_s = busy_s * _share(took.evaluated_tokens, took.generated_tokens)
    return {
        "starting": starting_s,
        "paused_for_push": paused_s,
        "generating": busy_s - evaluating_s,
        "evaluating": evaluating_s,
        "waiting_for_gateway": left.take(took.in_flight_s - busy_s - paused_s),
        "waiting_for_agents": left.take(took.rolling_s - took.in_flight_s),
        "waiting_for_admission": left.take(took.producing_s - took.rolling_s),
        "other": left.seconds,
    }


class _Left:
    """Time that belongs to no activity yet."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(0.0, seconds)

    def take(self, wanted_s: float) -> float:
        taken_s = min(max(0.0, wanted_s), self.seconds)
        self.seconds -= taken_s
        return taken_s


def _share(part: int, whole: int) -> float:
    return min(1.0, max(0, part) / whole) if whole > 0 else 0.0
