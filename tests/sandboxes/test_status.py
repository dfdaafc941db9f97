"""How an end is judged, where a real program would take long or is hard to bring to it.

1. Exit code 0 is OK whatever else is said; 2. SIGKILL after all CPU time is a time-out, before it is not; 3. a failure
with nearly all memory resident is for want of memory, by exit or by signal; 4. `MemoryError` counts in the last line
alone; 5. limits are positive and finite; 6. isolation has an order.
"""

import signal

import pytest

from sandboxes import Isolation, Limits, Status
from sandboxes.cell import status_of
from sandboxes.link import Ended

LIMITS = Limits(wall_s=3.0, memory_bytes=100_000_000)


@pytest.mark.parametrize(
    ("code", "cpu_s", "peak_memory_bytes", "stderr", "status"),
    [
        (0, 0.1, 99_000_000, b"MemoryError\n", Status.OK),
        (-signal.SIGKILL, 4.0, 0, b"", Status.TIMEOUT),
        (-signal.SIGKILL, 1.4, 0, b"", Status.SIGNALED),
        (1, 0.1, 90_000_000, b"", Status.MEMORY),
        (-signal.SIGSEGV, 0.1, 90_000_000, b"", Status.MEMORY),
        (1, 0.1, 89_000_000, b"", Status.NONZERO),
        (1, 0.1, 0, b"x\nMemoryError: no room\n", Status.MEMORY),
        (1, 0.1, 0, b"MemoryError\nhandled\n", Status.NONZERO),
    ],
)
def test_status(code: int, cpu_s: float, peak_memory_bytes: int, stderr: bytes, status: Status) -> None:
    ended = Ended(wait_status=0, cpu_s=cpu_s, peak_memory_bytes=peak_memory_bytes)
    assert status_of(code, ended, stderr, LIMITS) is status


@pytest.mark.parametrize("value", [0, -1, 1e300, float("inf"), float("nan")])
def test_limits_are_positive_and_finite(value: float) -> None:
    with pytest.raises(ValueError, match=r"Limits\.wall_s is .*; give a positive number"):
        Limits(wall_s=value)


def test_isolation_has_an_order() -> None:
    assert Isolation.CONTAINER.covers(Isolation.NAMESPACES)
    assert Isolation.PROCESS.covers(Isolation.PROCESS)
    assert not Isolation.PROCESS.covers(Isolation.NAMESPACES)
