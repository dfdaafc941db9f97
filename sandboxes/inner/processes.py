"""Processes as their parent sees them: children, groups, exits."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator


def children_of(pid: int) -> list[int]:
    """Return the children of a single-threaded process; empty where the kernel does not list them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def kill_group(pid: int) -> None:
    """Kill a process and its group; by its own id too, since it may not have made its group yet."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_rest_of_group(pid: int) -> None:
    """Kill the group of a reaped process: its id may be reused by now, but a group id is not while it has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def exited_children() -> Iterator[tuple[int, int, resource.struct_rusage]]:
    """Reap the children that have ended by now."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, usage
