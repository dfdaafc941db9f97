"""When something was busy, over several processes: spans that are kept, sent and united. It knows not what was busy.

Times are of the monotonic clock, which all processes of a machine share.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

Span = tuple[float, float]
"""From, to."""


class SpanLog:
    """The spans in which at least one of something was under way, kept until they are taken.

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
        self._now = now
        self._num_running = 0
        self._since = 0.0
        self._ended: list[Span] = []

    @contextmanager
    def one(self) -> Generator[None]:
        if self._num_running == 0:
            self._since = self._now()
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0 and (now := self._now()) > self._since:
                self._ended.append((self._since, now))

    def take(self) -> tuple[list[Span], float]:
        """What was not taken yet, and until when it is complete. A span under way is cut there."""
        now = self._now()
        taken, self._ended = self._ended, []
        if self._num_running:
            taken.append((self._since, now))
            self._since = now
        return taken, now


class SpanUnion:
    """The seconds in which at least one of several sources was busy.

    Sources report when they like. What all of them have reported is folded into a number, so that memory does not grow.

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
        """A source that will report what it does from `since` on."""
        self._until[source] = since

    def leave(self, source: object) -> None:
        """A source that reports no more."""
        self._until.pop(source, None)
        self._settle()

    def add(self, source: object, spans: Iterable[Span], until: float) -> None:
        """What `source` did since its last report; it is complete up to `until`."""
        self._open = _united([*self._open, *spans])
        self._until[source] = until
        self._settle()

    @property
    def seconds(self) -> float:
        return self._settled_s + sum(end - start for start, end in self._open)

    def _settle(self) -> None:
        """Fold what lies before the report that is oldest."""
        horizon = min(self._until.values(), default=float("inf"))
        self._settled_s += sum(min(end, horizon) - start for start, end in self._open if start < horizon)
        self._open = [(max(start, horizon), end) for start, end in self._open if end > horizon]


def _united(spans: Iterable[Span]) -> list[Span]:
    """The same time, in order, as spans that do not touch."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united
