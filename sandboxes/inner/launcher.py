"""The resident launcher: a small process that forks, confines and reaps programs at its host's request.

Nothing of the host is in this process, so a forked program inherits nothing of it. `link.py` is the host's end.

::

    host ── START id + 4 descriptors, KILL id ──▶ launcher ── fork, confine, run ──▶ program
         ◀── HELLO, STARTED, ENDED, FAILED ─────           ◀── SIGCHLD, wait status ──

What to run, its stdin and its output travel through the four descriptors (request, stdin, stdout, stderr), straight
between host and program. The launcher reads none of them, so it holds no data that one program could take from
another; and a program that took over the launcher could forge no text, since control frames carry none.

When the host ends, however it ends, the control socket closes: the launcher kills every program, removes ROOT and ends.

In a jail (`walls.py`) the launcher is the first process, and walls stand around it. It then needs no Landlock, hands
its host descriptors of the working folder and of itself, and ends without sweeping, since everything ends with it.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from sandboxes.inner.files import remove_tree
from sandboxes.inner.kernel import (
    IS_LINUX,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    drop_privileges,
    prctl,
    syscall,
)
from sandboxes.inner.processes import (
    exited_children,
    forget_package,
    kill_group,
    kill_rest_of_group,
    kill_strays,
    serve,
)
from sandboxes.inner.program import Interpreter, run_program
from sandboxes.inner.wire import MAX_DESCRIPTORS, REPORT, REQUEST, ReportKind, RequestKind

PROCESS_COUNT_AGE_S = 10.0
MAX_SWEEPS = 100
"""After this many rounds the launcher stops chasing a program that forks faster than it is killed (see README.md)."""
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
LANDLOCK_WRITE_FILE, LANDLOCK_REMOVE_AND_MAKE, LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 1, 0x1FF << 4, 1 << 13, 1 << 14
LANDLOCK_SCOPE_ABSTRACT_SOCKETS, LANDLOCK_SCOPE_SIGNALS = 1 << 0, 1 << 1
LANDLOCK_RULE_PATH_BENEATH = 1


class Launcher:
    """Forks programs, and is responsible for every process that comes of them."""

    def __init__(self, control: socket.socket, interpreter: Interpreter, handed: Sequence[int] = ()) -> None:
        """`handed` are the descriptors that a jail's launcher gives to the host."""
        self._control = control
        self._interpreter = interpreter
        self._handed = handed
        self._is_jailed = bool(handed)
        self._pid = os.getpid()
        self._runs: dict[int, int] = {}  # run id by pid
        self._landlock = 0 if self._is_jailed else landlock_version()
        self._num_processes = 0  # of this user; 0: not known
        self._counted_s = float("-inf")

    def serve(self) -> None:
        """Serve until the host is gone."""
        if IS_LINUX:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans and daemons become our children, so that we can kill them
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # with Python's own handler, a program of this jail could end us
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, but it reports files that grow too long
        self._greet()
        serve(self._control, self._reap, self._take_request)

    def kill_all(self) -> None:
        """Kill every program, and what is left of them."""
        pids = list(self._runs)
        self._runs.clear()
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        kill_strays(self._runs, MAX_SWEEPS)

    def _take_request(self) -> bool:
        """Do what the host asks; False when the host is gone."""
        try:
            frame, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, MAX_DESCRIPTORS)
        except ConnectionError:
            return False
        if len(frame) < REQUEST.size:
            return False
        kind, run_id = REQUEST.unpack(frame)
        if kind == RequestKind.START:
            self._start(run_id, descriptors)
        else:
            for pid in [pid for pid, running in self._runs.items() if running == run_id]:
                kill_group(pid)
        return True

    def _start(self, run_id: int, descriptors: list[int]) -> None:
        self._count_processes()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(ReportKind.FAILED, run_id, error.errno or 0)
        else:
            if pid == 0:
                run_program(self._interpreter, self._set_up(run_id, descriptors))
            self._runs[pid] = run_id
            self._report(ReportKind.STARTED, run_id, pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _set_up(self, run_id: int, descriptors: list[int]) -> dict[str, Any]:
        """Give up everything in the child, and return what to run."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            request_fd, *standard = descriptors[:4]
            request = json.loads(os.pread(request_fd, os.fstat(request_fd).st_size, 0))
            for group in descriptors[4:]:
                os.write(group, b"0")  # this process, and all its descendants with it
            for target, descriptor in enumerate(standard):
                os.dup2(descriptor, target)
            enter(request["folder"])
            self._confine(request)
        except BaseException as error:  # the boundary: nothing of the program has run, so the host is told
            self._report(ReportKind.FAILED, run_id, (error.errno if isinstance(error, OSError) else None) or 0)
            os._exit(1)
        os.closerange(3, 256)  # the launcher opens a dozen descriptors, with the lowest free numbers
        return request

    def _confine(self, request: dict[str, Any]) -> None:
        if self._is_jailed:  # there the launcher has no privilege itself, and nothing survives it
            prctl(PR_SET_DUMPABLE, 1)  # unlike the launcher
        elif IS_LINUX:
            drop_privileges()
            if self._landlock:
                restrict_to_folder(self._landlock)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)  # the launcher died before this could watch it
        os.chdir(request["cwd"])
        set_limits(request, self._num_processes)

    def _count_processes(self) -> None:
        """Count the user's processes. The kernel does not limit root's, and macOS has no /proc (see README.md)."""
        now_s = time.monotonic()
        if IS_LINUX and os.getuid() != 0 and now_s - self._counted_s > PROCESS_COUNT_AGE_S:
            self._counted_s = now_s
            self._num_processes = count_user_tasks()

    def _reap(self) -> None:
        """Take the status of what has ended; report a program only once all its descendants are dead too."""
        ended: list[tuple[int, ...]] = []
        for pid, *outcome in exited_children():
            run_id = self._runs.pop(pid, None)
            if run_id is not None:
                kill_rest_of_group(pid)
                ended.append((run_id, *outcome))
        kill_strays(self._runs, MAX_SWEEPS)
        for report in ended:
            self._report(ReportKind.ENDED, *report)

    def _greet(self) -> None:
        with contextlib.suppress(ConnectionError):  # the host is gone, which the next read will show
            socket.send_fds(self._control, [REPORT.pack(ReportKind.HELLO, 0, self._landlock, 0, 0)], self._handed)
        for descriptor in self._handed:
            os.close(descriptor)

    def _report(self, kind: ReportKind, run_id: int, value: int, cpu_us: int = 0, peak_bytes: int = 0) -> None:
        with contextlib.suppress(ConnectionError):  # the host is gone, which the next read will show
            self._control.sendall(REPORT.pack(kind, run_id, value, cpu_us, peak_bytes))


def enter(folder: str) -> None:
    """Enter the working directory, even if an earlier program locked it, as its owner may."""
    if not os.stat(folder).st_mode & stat.S_IXUSR:
        os.chmod(folder, 0o700)
    os.chdir(folder)


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has, 0 for none."""
    if not IS_LINUX:
        return 0
    try:
        return syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict_to_folder(version: int) -> None:
    """Allow changes only beneath the current folder, and no signalling or tracing of outside processes.

    Signals need version 6 (Linux 6.12). Landlock always denies tracing, and with it reading the environment and memory
    of other processes.
    """
    writes = LANDLOCK_WRITE_FILE | LANDLOCK_REMOVE_AND_MAKE
    writes |= (LANDLOCK_REFER if version >= 2 else 0) | (LANDLOCK_TRUNCATE if version >= 3 else 0)
    scopes = LANDLOCK_SCOPE_ABSTRACT_SOCKETS | LANDLOCK_SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("=QQQ", writes, 0, scopes)
    size = 24 if version >= 6 else 8
    ruleset = syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for path, allowed in ((".", writes), (os.devnull, writes & (LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE))):
        beneath = os.open(path, os.O_PATH)
        syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
    syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)


def set_limits(request: dict[str, Any], num_processes: int) -> None:
    """Set the kernel's limits on each process of the program. Control groups enforce those that are None.

    The kernel counts processes by user, so the limit is `num_processes`, which exist already, plus `new_processes`.
    """
    lower_limit(resource.RLIMIT_CORE, 1)  # with 0, a host that pipes core dumps to a program runs it (core(5))
    lower_limit(resource.RLIMIT_FSIZE, request["file_bytes"])
    lower_limit(resource.RLIMIT_NOFILE, request["open_files"])
    if request["new_processes"] is not None and num_processes:
        lower_limit(resource.RLIMIT_NPROC, num_processes + request["new_processes"])
    # The soft limit ends the program with SIGXCPU; one that ignores it dies a second later.
    if request["cpu_s"] is not None:
        lower_limit(resource.RLIMIT_CPU, request["cpu_s"], grace=1)
    if request["address_space_bytes"] is not None:
        lower_limit(resource.RLIMIT_AS, request["address_space_bytes"])


def lower_limit(name: int, value: int, *, grace: int = 0) -> None:
    """Set a soft limit, and a hard limit `grace` above it; a stricter hard limit of the host's stays."""
    _, ceiling = resource.getrlimit(name)
    hard = value + grace if ceiling == resource.RLIM_INFINITY else min(value + grace, ceiling)
    resource.setrlimit(name, (min(value, hard), hard))


def count_user_tasks() -> int:
    """Return the number of processes and threads of this user, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it may end while we look
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"{entry.path}/task"))
    return count


def control_socket(inherited: int) -> socket.socket:
    """Return the inherited socket under a low number, since `_set_up` closes only numbers from 3 to 255."""
    control = socket.socket(fileno=os.dup(inherited))
    os.close(inherited)
    return control


def main() -> None:
    control, root = control_socket(int(sys.argv[1])), sys.argv[2]
    interpreter = Interpreter({})
    forget_package()
    launcher = Launcher(control, interpreter)
    launcher.serve()
    launcher.kill_all()
    with contextlib.suppress(OSError):  # the host tries again, or `reap`
        remove_tree(root)
