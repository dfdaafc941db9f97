"""A clock for one thread that stands still while the thread waits for a core: on a busy machine nobody is to blame.

Linux tells how long a thread has waited (`/proc/.../schedstat`, its second number, in nanoseconds); elsewhere the clock
simply goes on.
"""

import time
from collections.abc import Callable
from pathlib import Path

THREADS = Path("/proc/self/task")


def clock_of_thread(native_thread_id: int, threads: Path = THREADS) -> Callable[[], float]:
    """Seconds; only differences mean anything. `threads` holds a folder for each thread."""
    schedstat = threads / str(native_thread_id) / "schedstat"

    def now() -> float:
        try:
            waited_ns = int(schedstat.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            waited_ns = 0
        return time.monotonic() - waited_ns / 1e9

    return now
