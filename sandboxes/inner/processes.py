"""Processes as their parent sees them: hearing of their ends, killing them with all that came of them, running one.

The launcher and, in containers, the agent's forker use it. So it needs only what Debian's `python3-minimal` has.
"""

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Container, Iterator
from typing import NoReturn

try:
    import resource
except ImportError:
    resource = None


def serve(control: socket.socket, reap: Callable[[], None], take: Callable[[], bool]) -> None:
    """Call `reap` when children have ended and `take` when `control` can be read, until `take` returns False."""
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # the pipe is written only for signals with a handler
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([wake_read, control], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            reap()
        if control in ready and not take():
            return


def exited_children() -> Iterator[tuple[int, int, int, int]]:
    """Yield pid, wait status, CPU microseconds and peak resident bytes of every child that has ended by now."""
    while True:
        try:
            pid, *outcome = _wait_for_one()
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, outcome[0], outcome[1], outcome[2]


def _wait_for_one() -> tuple[int, int, int, int]:
    if resource is not None:  # without it os.wait4 does not work either
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        peak_bytes = usage.ru_maxrss * (1024 if sys.platform == "linux" else 1)
        return pid, status, int((usage.ru_utime + usage.ru_stime) * 1e6), peak_bytes
    before = os.times()
    pid, status = os.waitpid(-1, os.WNOHANG)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return pid, status, int(cpu_s * 1e6), 0


def kill_group(pid: int) -> None:
    """Kill a process and its group; by its own id too, since it may not have made its group yet."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_rest_of_group(pid: int) -> None:
    """Kill the group of a reaped process: its id may be reused by now, but a group id is not while it has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_strays(
    programs: Container[int],
    max_sweeps: int,
    *,
    spared: int | None = None,
    before_sweep: Callable[[int], None] = lambda _number: None,
) -> None:
    """Kill the orphans of dead programs and the daemons of living ones, and what these leave in turn.

    `programs` are the pids, and so the groups, of those that run: an orphan in such a group dies with its program.
    """
    for number in range(max_sweeps):
        strays = [pid for pid in children_of(os.getpid()) if pid != spared and _is_stray(pid, programs)]
        if not strays:
            return
        before_sweep(number)
        for pid in strays:
            kill_group(pid)
        for pid in strays:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _is_stray(pid: int, programs: Container[int]) -> bool:
    try:
        return pid not in programs and os.getpgid(pid) not in programs
    except ProcessLookupError:
        return False


def children_of(pid: int) -> list[int]:
    """Return the children of a single-threaded process; empty where there is no /proc.

    If the kernel does not list them, every process is asked for its parent.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        names = os.listdir("/proc") if os.path.isdir("/proc") else []
        return [child for child in map(int, filter(str.isdigit, names)) if _parent_of(child) == pid]


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def run_executable(argv: list[str] | list[bytes], env: dict[str, str] | dict[bytes, bytes]) -> NoReturn:
    """Become an executable. One that cannot be run ends as in a shell: exit code 127 or 126, the reason on stderr."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        os.write(2, f"sandbox: cannot run {os.fsdecode(argv[0])!r}: {reason}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def forget_package() -> None:
    """Remove our modules: a program may have a module named `sandboxes`."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sandboxes"]:
        del sys.modules[name]
