"""How long things took, counted in buckets: what Prometheus calls a histogram. Knows no clock and no request.

>>> latency = Latency()
>>> latency.add(0.02), latency.add(7.0)
(None, None)
>>> latency.sum_s, latency.buckets()[:3], latency.buckets()[-1]
(7.02, [('0.01', 0), ('0.03', 1), ('0.1', 1)], ('+Inf', 2))
"""

from bisect import bisect_left
from itertools import accumulate

BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Latency:
    """One thread adds; others may read."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)  # of each bucket alone; the last is beyond all bounds

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many took no longer."""
        return list(zip([*map(str, BOUNDS_S), "+Inf"], accumulate(self._counts), strict=True))
