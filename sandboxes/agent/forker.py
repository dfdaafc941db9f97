"""The forker: forks programs, kills what is left of them, and reports how each ended.

It gets descriptors and numbers from the relay, and reads none of the descriptors. Orphans become its children. In
containers and jails it is the first process, which the kernel shields from the others. Wherever the host is root, its
user differs from the programs', so they can neither signal nor trace it. Where programs are to run as root (`FOR_ROOT`
follows on the command line), forker and relay therefore become another user, and the forker keeps its capabilities.

`main` starts an agent in a container, `main_without_walls` the agent of the subprocess backend; `walls.py` starts those
of jails.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import sys
from collections.abc import Container, Iterator
from typing import NoReturn

from sandboxes.agent import kernel
from sandboxes.agent.files import remove_tree
from sandboxes.agent.interpreter import Interpreter
from sandboxes.agent.program import become_program
from sandboxes.agent.relay import Relay, files_of_counters
from sandboxes.agent.wire import NUM_DESCRIPTORS, ORDER, REPORT, Order, Report

MANY_SWEEPS = 4
"""Processes that survive this many sweeps fork faster than they can be killed one by one."""
MAX_SWEEPS = 1000
"""After this many rounds the forker stops chasing a program that forks faster than it is killed (see backends.md)."""
FIRST_PROCESS = 1
FOR_ROOT, AGENT_UID = "for-root", 65532
ALL_SIGNALS = [int(number) for number in signal.valid_signals()]


class Forker:
    """Forks and reaps. `relay` is a socket that keeps messages apart.

    `relay_pid` is given if the relay is its child. `has_walls` is false where other processes share its users.
    """

    def __init__(
        self, relay: socket.socket, warm: Interpreter, relay_pid: int | None = None, *, has_walls: bool = True
    ) -> None:
        self._relay = relay
        self._warm = warm
        self._relay_pid = relay_pid
        self._unwalled_pid = None if has_walls else os.getpid()
        self._runs: dict[int, tuple[int, int]] = {}  # number and user, by pid

    def serve(self) -> None:
        """Serve until the relay is gone, which ends with the host."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a first process gets the signals that it has a handler for
        wake_read, wake_write = os.pipe()
        for descriptor in (wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # the pipe is written only for handled signals
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        with contextlib.suppress(ConnectionError):  # the relay ended while it was told something
            while True:
                ready, _, _ = select.select([wake_read, self._relay], [], [])
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self._relay in ready and not self._take_order():
                    return

    def kill_all(self) -> None:
        """Kill every program, and what is left of them."""
        pids = list(self._runs)
        self._runs.clear()
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        self._kill_strays()

    def _take_order(self) -> bool:
        """Obey an order; return False when the relay is gone."""
        message, descriptors, _, _ = socket.recv_fds(self._relay, ORDER.size, NUM_DESCRIPTORS)
        if not message:
            return False
        kind, run_id, uid = ORDER.unpack(message)
        if kind == Order.START:
            self._start(run_id, uid, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == Order.KILL:
            for pid in [pid for pid, (number, _) in self._runs.items() if number == run_id]:
                kill_group(pid)
                self._kill_user(uid, but_for=pid)
        return True

    def _start(self, run_id: int, uid: int, descriptors: list[int]) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(run_id, descriptors)
        except OSError as error:
            self._report(Report.FAILED, run_id, error.errno or errno.EAGAIN)
        else:
            self._runs[pid] = run_id, uid
            self._report(Report.STARTED, run_id, pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _become(self, run_id: int, descriptors: list[int]) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGXFSZ):  # Python ignores the second, which reports long files
                signal.signal(number, signal.SIG_DFL)
            request, *standard = descriptors
            told = os.pread(request, os.fstat(request).st_size, 0)
            become_program(self._warm, told, standard, self._unwalled_pid)
        except BaseException as error:  # the boundary: nothing of the program has run, so the host is told
            with contextlib.suppress(OSError):
                self._report(Report.FAILED, run_id, getattr(error, "errno", None) or 0)
        os._exit(255)

    def _reap(self) -> None:
        """Take the status of what has ended; report a program only once all its descendants are dead too."""
        reports: list[tuple[int, ...]] = []
        for pid, *outcome in exited_children():
            run_id, uid = self._runs.pop(pid, (None, 0))
            if run_id is not None:
                kill_rest_of_group(pid)
                self._kill_user(uid)
                reports.append((run_id, *outcome))
        self._kill_strays()
        for report in reports:
            self._report(Report.ENDED, *report)

    def _kill_strays(self) -> None:
        """Kill the orphans of dead programs and the daemons of living ones, and what these leave in turn.

        If they keep coming, kill all programs of all users; otherwise the whole sandbox would have to die.
        """
        for sweep in range(MAX_SWEEPS):
            strays = [pid for pid in children_of(os.getpid()) if pid != self._relay_pid and is_stray(pid, self._runs)]
            if not strays:
                return
            if sweep >= MANY_SWEEPS:
                for uid in {uid for _, uid in self._runs.values()}:
                    self._kill_all_of(uid)
            for pid in strays:
                kill_group(pid)
            for pid in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _kill_user(self, uid: int, but_for: int | None = None) -> None:
        """Kill all processes of a user, unless another program runs as this user."""
        if not any(other == uid for pid, (_, other) in self._runs.items() if pid != but_for):
            self._kill_all_of(uid)

    def _kill_all_of(self, uid: int) -> None:
        """Kill all processes of a user at once, faster than any can fork.

        Only the first process of a namespace may: elsewhere the host itself may be this user.
        """
        if os.getpid() != FIRST_PROCESS:
            return
        own_uid = os.getuid()
        if uid != own_uid:
            os.setresuid(uid, uid, own_uid)  # a user who may signal these processes and no others
        if own_uid == AGENT_UID:  # of others the kernel takes KILL away with the user
            kernel.set_capabilities(0, kernel.OF_AGENT_OF_ROOT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if uid != own_uid:
            os.setresuid(own_uid, own_uid, own_uid)
        if own_uid == AGENT_UID:
            kernel.set_capabilities(kernel.OF_AGENT_OF_ROOT, kernel.OF_AGENT_OF_ROOT)

    def _report(self, kind: int, run_id: int, value: int, cpu_us: int = 0, peak_bytes: int = 0) -> None:
        self._relay.send(REPORT.pack(kind, run_id, value, cpu_us, peak_bytes))


def main(system_call_filter: bytes) -> NoReturn:
    """Run the agent in the first process of a container, whose standard streams are the stream to the host.

    The filter holds for everything from here on.
    """
    if system_call_filter:
        kernel.load_filter(system_call_filter)
    forget_package()
    for_forker, for_relay = agent_sockets()
    if (relay_pid := os.fork()) == 0:
        for_forker.close()
        relay = Relay(0, 1, for_relay, files_of_counters())
        if FOR_ROOT in sys.argv:
            os.setresuid(AGENT_UID, AGENT_UID, AGENT_UID)
        relay.serve(bytes([0]))
        os._exit(0)
    for_relay.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the stream belongs to the relay alone
        os.dup2(nothing, descriptor)
    if FOR_ROOT in sys.argv:
        kernel.change_user(AGENT_UID, kernel.OF_AGENT_OF_ROOT)
    Forker(for_forker, Interpreter(), relay_pid).serve()
    os._exit(0)


def main_without_walls() -> None:
    """Run the agent beside the host, and remove a folder when the host is gone: arguments are the stream and it."""
    control, root = low_socket(int(sys.argv[1])), sys.argv[2]
    if kernel.IS_LINUX:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    for_forker, for_relay = agent_sockets()
    if (relay_pid := os.fork()) == 0:
        for_forker.close()
        relay = Relay(control.fileno(), control.fileno(), for_relay, has_walls=False)
        relay.serve(bytes([kernel.landlock_version()]))
        os._exit(0)
    for_relay.close()
    control.close()
    forget_package()
    forker = Forker(for_forker, Interpreter(), relay_pid, has_walls=False)
    forker.serve()
    forker.kill_all()
    with contextlib.suppress(OSError):  # the host tries again, or `reap`
        remove_tree(root)


def agent_sockets() -> tuple[socket.socket, socket.socket]:
    """Return the forker's socket and the relay's. Messages are of fixed size, so a stream keeps them apart on macOS."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_STREAM)


def low_socket(inherited: int) -> socket.socket:
    """Return an inherited socket under a low number, since a program closes only numbers below `MAX_DESCRIPTORS`."""
    control = socket.socket(fileno=os.dup(inherited))
    os.close(inherited)
    return control


def forget_package() -> None:
    """Remove our modules: a program may have a module named `sandboxes`."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sandboxes"]:
        del sys.modules[name]


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
    pid, status, usage = os.wait4(-1, os.WNOHANG)
    peak_bytes = usage.ru_maxrss * (1024 if sys.platform == "linux" else 1)
    return pid, status, int((usage.ru_utime + usage.ru_stime) * 1e6), peak_bytes


def kill_group(pid: int) -> None:
    """Kill a process and its group; by its own id too, since it may not have made its group yet."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_rest_of_group(pid: int) -> None:
    """Kill the group of a reaped process: its id may be reused by now, but a group id is not while it has members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def is_stray(pid: int, programs: Container[int]) -> bool:
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
