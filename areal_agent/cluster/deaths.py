"""When a process that is started again and again dies too often. It knows no process."""

import time
from collections import deque
from collections.abc import Callable

MAX_DEATHS = 3
WITHIN_S = 60.0


class DeathCount:
    """Counts deaths against the time of service, in which starts are left out: they may take longer than a minute.

    >>> now = iter([0.0, 50.0, 80.0, 85.0])
    >>> count = DeathCount(now=lambda: next(now))
    >>> count.begin(); count.end()           # served for 50 s
    False
    >>> count.begin(); count.end()           # for 5 s
    False
    >>> count.end()                          # died in its start
    True
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None
        self._served_s = 0.0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    def begin(self) -> None:
        """It serves from now on."""
        self._since = self._now()

    def end(self) -> bool:
        """It has died; whether that is `MAX_DEATHS` within `WITHIN_S` of service."""
        if self._since is not None:
            self._served_s += self._now() - self._since
            self._since = None
        self._deaths.append(self._served_s)
        return len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] <= WITHIN_S
