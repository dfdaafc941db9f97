"""Sampled tokens a second, by what was counted when somebody asked before. It knows no engine and keeps no thread."""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 10.0
"""However often it is asked, the rate is over so long, or over the time since the last question, if that was longer."""


class Throughput:
    """Of a count that only grows and begins at 0. Use it from one thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._readings = deque([(now(), 0)])  # when, and how many; the first may be older than the window

    def rate(self, num_tokens: int) -> float:
        """A second, now that so many have been counted."""
        now_s = self._now()
        while len(self._readings) > 1 and self._readings[1][0] <= now_s - WINDOW_S:
            self._readings.popleft()
        since_s, before = self._readings[0]
        self._readings.append((now_s, num_tokens))
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0
