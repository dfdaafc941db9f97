"""The CPU seconds of a process and all its descendants, of all their threads. Linux only."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Return the CPU seconds since all of them started, without threads that have ended."""
    return sum(_own_cpu_ns(one) for one in family(pid)) / 1e9


def family(pid: int) -> Iterator[int]:
    """Yield the process and its descendants."""
    yield pid
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def _own_cpu_ns(pid: int) -> int:
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total
