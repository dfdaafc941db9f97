"""Where the time of one side goes: every second belongs to exactly one named activity. It knows no activity by name."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

OTHER = "other"
"""What is under way when nothing was named."""


class _Activity:
    """One activity from its start to its end; told from others of its name by identity."""

    def __init__(self, name: str) -> None:
        self.name = name


class TimeAccount:
    """Attributes time, from when it is made on. Of activities within each other, the one that began last counts.

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
        self._under_way: list[_Activity] = []

    @contextmanager
    def during(self, activity: str) -> Generator[None]:
        """All time within goes to `activity`, but for what activities inside it take."""
        mine = _Activity(activity)
        self._settle()
        self._under_way.append(mine)
        try:
            yield
        finally:
            self._settle()
            self._under_way.remove(mine)

    def seconds(self) -> dict[str, float]:
        """Seconds by activity until now. Their sum is the wall time since the account was made."""
        self._settle()
        return dict(self._seconds)

    def shares(self) -> dict[str, float]:
        """The same as shares of the wall time, which sum to 1; empty when no time has passed."""
        seconds = self.seconds()
        wall_s = sum(seconds.values())
        return {activity: one / wall_s for activity, one in seconds.items()} if wall_s > 0 else {}

    def _settle(self) -> None:
        """Book what has passed since the last time on what was under way."""
        now = self._now()
        activity = self._under_way[-1].name if self._under_way else OTHER
        self._seconds[activity] = self._seconds.get(activity, 0.0) + now - self._settled_at
        self._settled_at = now
