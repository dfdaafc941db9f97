"""How long at least one of something was under way. It knows not what."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class BusyClock:
    """Counts what is under way, and the seconds in which it was at least one.

    >>> now = iter([0.0, 2.0, 5.0])
    >>> clock = BusyClock(now=lambda: next(now))
    >>> with clock.one():                 # from 0.0 to 2.0
    ...     num_inside = clock.num_running
    >>> num_inside, clock.busy_s
    (1, 2.0)
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._busy_s = 0.0
        self._since = 0.0
        self.num_running = 0

    @contextmanager
    def one(self) -> Generator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """One more is under way, until the `end` that belongs to it."""
        if self.num_running == 0:
            self._since = self._now()
        self.num_running += 1

    def end(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._busy_s += self._now() - self._since

    @property
    def busy_s(self) -> float:
        return self._busy_s + (self._now() - self._since if self.num_running else 0.0)
