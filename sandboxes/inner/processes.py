"""Processes as their parent sees them: children, groups, the dead. It knows no program."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator


def children_of(pid: int) -> list[int]:
    """The children of a process of one thread; empty where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def kill_group(pid: int) -> None:
    """A process and its group: it is killed by its own id too, for it may not have made its group yet."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_rest_of_group(pid: int) -> None:
    """Of a process that was waited for: its id may be another's by now, its group's is not while it has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exited_children() -> Iterator[tuple[int, int, resource.struct_rusage]]:
    """Reap what has ended by now."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, usage
