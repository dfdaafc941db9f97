"""A clock that goes when a test says so: what is due happens in order, at once, in the test's own thread.

>>> clock = VirtualClock()
>>> clock.call_later(2.0, lambda: print("at", clock.now_s))
>>> clock.advance(1.0)
>>> clock.advance(9.0)
at 2.0
>>> clock.now_s
10.0
"""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._num_planned = 0  # what is due at the same time happens in the order in which it was planned

    def call_later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action` once the clock has gone so far."""
        heapq.heappush(self._due, (self.now_s + delay_s, self._num_planned, action))
        self._num_planned += 1

    def advance(self, duration_s: float) -> None:
        """Let time pass; what becomes due meanwhile, also by what happens meanwhile, happens at its time."""
        end_s = self.now_s + duration_s
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = end_s
