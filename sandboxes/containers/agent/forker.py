"""The first process of a container: forks programs, kills what is left of them, and reports how each ended.

It gets descriptors and numbers from the relay, and reads none of the descriptors. Orphans become its children. Its user
differs from the programs', so they can neither signal nor trace it; besides, the kernel shields a first process.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NoReturn

from sandboxes.containers.agent.program import HAS_RESOURCE

ORDER = struct.Struct("=BQI")
"""START or KILL, number of the run, user. START comes with descriptors: request, stdin, stdout, stderr."""
REPORT = struct.Struct("=BQiQQ")
"""STARTED, ENDED or FAILED, number of the run, wait status or errno, CPU microseconds, peak resident bytes."""
NUM_DESCRIPTORS = 4
START, KILL = 1, 2
ENDED, FAILED, STARTED = 1, 2, 3
MANY_SWEEPS = 4
"""Processes that survive this many sweeps fork faster than they can be killed one by one."""
MAX_SWEEPS = 1000


class Forker:
    """Forks and reaps. `relay` is a socket that keeps messages apart; `become` turns a child into the program."""

    def __init__(self, relay: socket.socket, relay_pid: int, become: Callable[[bytes, list[int]], NoReturn]) -> None:
        self._become_program = become
        self._relay = relay
        self._relay_pid = relay_pid
        self._runs: dict[int, tuple[int, int]] = {}  # number and user, by pid
        self._wake_read, self._wake_write = os.pipe()

    def serve(self) -> None:
        """Serve until the relay is gone, which ends with the host."""
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # so that the wake-up pipe is written
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._wake_read, self._relay], [], [])
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._reap()
            if self._relay in ready and not self._take_order():
                return

    def _take_order(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._relay, ORDER.size, NUM_DESCRIPTORS)
        if not message:
            return False
        kind, run_id, uid = ORDER.unpack(message)
        if kind == START:
            self._start(run_id, uid, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == KILL:
            for pid in [pid for pid, (number, _) in self._runs.items() if number == run_id]:
                kill_group(pid)
                self._kill_user(uid, but_for=pid)
        return True

    def _start(self, run_id: int, uid: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._report(FAILED, run_id, error.errno or errno.EAGAIN)
            return
        if pid == 0:
            self._become(run_id, descriptors)
        self._runs[pid] = run_id, uid
        self._report(STARTED, run_id, 0)

    def _become(self, run_id: int, descriptors: list[int]) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGXFSZ):  # Python ignores the second, which reports long files
                signal.signal(number, signal.SIG_DFL)
            request, *standard = descriptors
            self._become_program(os.pread(request, os.fstat(request).st_size, 0), standard)
        except BaseException as error:  # the boundary: nothing of the program has run, so the host is told
            with contextlib.suppress(OSError):
                self._report(FAILED, run_id, getattr(error, "errno", None) or 0)
        os._exit(255)

    def _reap(self) -> None:
        """Take the status of what has ended; report a program only once all its descendants are dead too."""
        reports: list[tuple[int, ...]] = []
        for pid, *outcome in exited_children():
            if pid == self._relay_pid:
                os._exit(1)
            run_id, uid = self._runs.pop(pid, (None, 0))
            if run_id is not None:
                kill_group(pid)
                self._kill_user(uid)
                reports.append((run_id, *outcome))
        self._kill_strays()
        for report in reports:
            self._report(ENDED, *report)

    def _kill_user(self, uid: int, but_for: int | None = None) -> None:
        """Kill all processes of a user, unless another program runs as this user."""
        if any(other == uid for pid, (_, other) in self._runs.items() if pid != but_for):
            return
        kill_all_of(uid)

    def _kill_strays(self) -> None:
        """Kill the orphans of dead programs and the daemons of living ones, and what these leave in turn.

        If they keep coming, all programs of their users die; otherwise the whole container would have to.
        """
        for sweep in range(MAX_SWEEPS):
            strays = [pid for pid in children() if self._is_stray(pid)]
            if not strays:
                return
            if sweep >= MANY_SWEEPS:
                for uid in {uid for _, uid in self._runs.values()}:
                    kill_all_of(uid)
            for pid in strays:
                kill_group(pid)
            for pid in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _is_stray(self, pid: int) -> bool:
        """Return whether a child is an orphan outside the group of every running program; one inside dies with its
        program.
        """
        if pid == self._relay_pid or pid in self._runs:
            return False
        try:
            return os.getpgid(pid) not in self._runs
        except ProcessLookupError:
            return False

    def _report(self, kind: int, run_id: int, value: int, cpu_us: int = 0, peak_bytes: int = 0) -> None:
        self._relay.send(REPORT.pack(kind, run_id, value, cpu_us, peak_bytes))


def exited_children() -> Iterator[tuple[int, int, int, int]]:
    """Yield pid, status, CPU microseconds and peak resident bytes of every child that has ended."""
    while True:
        try:
            pid, *usage = wait_for_one()
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, usage[0], usage[1], usage[2]


def wait_for_one() -> tuple[int, int, int, int]:
    if HAS_RESOURCE:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
        return pid, status, int((usage.ru_utime + usage.ru_stime) * 1e6), usage.ru_maxrss * 1024
    before = os.times()
    pid, status = os.waitpid(-1, os.WNOHANG)
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return pid, status, int(cpu_s * 1e6), 0


def kill_all_of(uid: int) -> None:
    """Kill all processes of a user at once, faster than any can fork."""
    os.setresuid(uid, uid, 0)  # a user who may signal these processes and no others
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    os.setresuid(0, 0, 0)


def kill_group(pid: int) -> None:
    """Kill a process and its group; by its own id too, since it may not have made its group yet."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """Return the children of this process, by asking every process for its parent if the kernel does not list them."""
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == own]


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
