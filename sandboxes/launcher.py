"""The resident launcher: a small process that forks, confines and reaps programs at its host's request.

Run as `python -I -S launcher.py CONTROL_FD ROOT` by `link.py`, which shares the two structs below. This file stands
alone (standard library only): nothing of the host is in this process, so a forked program inherits nothing of it.

::

    host ── START id + 4 descriptors, KILL id ──▶ launcher ── fork, confine, run ──▶ program
         ◀── HELLO, STARTED, ENDED, FAILED ─────           ◀── SIGCHLD, wait status ──

What to run, its stdin and its output travel by the four descriptors (request, stdin, stdout, stderr), straight
between host and program. The launcher reads none of them: it holds no data that one program could take from
another, and a program that got here could forge nothing, for a control frame carries no text.

When the host goes, however it goes, the control socket closes: the launcher kills every program, removes ROOT,
and is gone.

In a jail (`inside.py`) it is the first process, and walls stand around it: it then needs no Landlock, hands its host
the folder in which programs work, and ends without sweeping, for all else ends with it.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import linecache
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NoReturn

REQUEST = struct.Struct("=BQ")
"""Request kind, run id."""
REPORT = struct.Struct("=BQiQQ")
"""Report kind, run id, value, CPU microseconds, peak resident bytes."""
MAX_DESCRIPTORS = 8
"""With START: request (JSON), stdin, stdout, stderr, then the control groups to join, as their open `cgroup.procs`."""


class RequestKind(IntEnum):
    """What the host asks."""

    START = 1
    KILL = 2


class ReportKind(IntEnum):
    """What the launcher answers, and what `value` is."""

    HELLO = 1  # ready; value: the version of Landlock in use, 0 for none; in a jail with the folder's descriptor
    STARTED = 2  # value: the program's pid, which is also its session and process group
    ENDED = 3  # value: the wait status; the program's group is dead
    FAILED = 4  # it could not be set up; value: errno, 0 when unknown; run id 0: not the program, the jail


REMOVE = 'chmod -R u+rwX -- "$1"; exec rm -rf -- "$1"'
"""The launcher's last act, in shell: a program may have locked its folders."""
PROGRAM_FILE = "<program>"
IS_LINUX = sys.platform == "linux"

PROCESS_COUNT_AGE_S = 10.0
MAX_SWEEPS = 100
"""A program that forks faster than it can be killed is given up after so many rounds (see README.md)."""


# ── confinement: what a forked child gives up before it runs a program ────────────────────────────────────────────

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
LANDLOCK_WRITE_FILE, LANDLOCK_REMOVE_AND_MAKE, LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 1, 0x1FF << 4, 1 << 13, 1 << 14
LANDLOCK_SCOPE_ABSTRACT_SOCKETS, LANDLOCK_SCOPE_SIGNALS = 1 << 0, 1 << 1
LANDLOCK_RULE_PATH_BENEATH = 1


def check(result: int) -> int:
    """The result of a libc call, or OSError with its errno."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int) -> None:
    check(LIBC.prctl(option, *(ctypes.c_ulong(argument) for argument in (value, 0, 0, 0))))


def syscall(number: int, *arguments: Any) -> int:
    """A system call that libc has no function for; integers go as C longs."""
    longs = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in (number, *arguments)]
    return check(LIBC.syscall(*longs))


def landlock_version() -> int:
    """The version of Landlock that this kernel has, 0 for none."""
    if not IS_LINUX:
        return 0
    try:
        return syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict_to_folder(version: int) -> None:
    """Landlock: change files beneath the current folder only, and no process outside may be signalled or traced.

    Signals need version 6 (Linux 6.12); tracing, and with it the environment and memory of other processes, is
    denied to any process under Landlock.
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


def drop_privileges() -> None:
    """No capability, not even root's, and none to be had from a setuid program."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header, nothing = struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    check(LIBC.capset(header, nothing))


def set_limits(request: dict[str, Any], num_processes: int) -> None:
    """The kernel's limits on each process of the program. Those of `None` are kept by control groups instead.

    The kernel counts processes by user: `new_processes` beside the `num_processes` that there are bound all together.
    """
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_FSIZE, request["file_bytes"])
    lower_limit(resource.RLIMIT_NOFILE, request["open_files"])
    if request["new_processes"] is not None and num_processes:
        lower_limit(resource.RLIMIT_NPROC, num_processes + request["new_processes"])
    # At the soft limit SIGXCPU ends the program; one that ignores it dies a second later.
    if request["cpu_s"] is not None:
        lower_limit(resource.RLIMIT_CPU, request["cpu_s"], grace=1)
    if request["address_space_bytes"] is not None:
        lower_limit(resource.RLIMIT_AS, request["address_space_bytes"])


def lower_limit(name: int, value: int, *, grace: int = 0) -> None:
    """Set a limit and its ceiling, `grace` above it; a stricter ceiling of the host's own stays."""
    _, ceiling = resource.getrlimit(name)
    hard = value + grace if ceiling == resource.RLIM_INFINITY else min(value + grace, ceiling)
    resource.setrlimit(name, (min(value, hard), hard))


def count_user_tasks() -> int:
    """Processes and threads of this user, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it may end while we look
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"{entry.path}/task"))
    return count


# ── the program: what a forked child does; none of these functions returns to the launcher ────────────────────────


def run_program(request: dict[str, Any]) -> NoReturn:
    """Become the program: an executable, or Python source in this very process."""
    if request["argv"] is not None:
        run_executable(request["argv"], request["env"])
    run_source(request["source"], request["env"])


def run_executable(argv: list[str], env: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        os.write(2, f"sandbox: cannot run {argv[0]!r}: {reason}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def run_source(source: str, env: dict[str, str]) -> NoReturn:
    """Run Python source as `__main__`, and end as Python ends, without the 7 ms of tearing the interpreter down."""
    exit_code = 0
    try:
        prepare_interpreter(source, env)
        program = types.ModuleType("__main__")
        sys.modules["__main__"] = program
        exec(compile(source, PROGRAM_FILE, "exec", dont_inherit=True), program.__dict__)
    except SystemExit as ending:
        exit_code = code_of(ending)
    except BaseException as error:  # the boundary: whatever the program raised becomes its traceback and exit code
        exit_code = 1
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error, error.__traceback__)
    finish_interpreter()
    os._exit(exit_code)


def prepare_interpreter(source: str, env: dict[str, str]) -> None:
    gc.enable()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [PROGRAM_FILE]
    sys.path.insert(0, "")  # modules in the working directory, as for any script
    sys.excepthook = print_traceback
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    lines = [f"{line}\n" for line in source.split("\n")]
    linecache.cache[PROGRAM_FILE] = (len(source), None, lines, PROGRAM_FILE)  # for tracebacks


def finish_interpreter() -> None:
    """Threads, exit handlers, buffers: in the order in which Python ends them."""
    with contextlib.suppress(BaseException):
        if (threading := sys.modules.get("threading")) is not None:
            threading._shutdown()
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):  # closed, or replaced by the program with anything
            stream.flush()


def code_of(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    with contextlib.suppress(BaseException):
        print(ending.code, file=sys.stderr)
    return 1


def print_traceback(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    """As Python's own, without the frames of this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(kind, error, frames)
    except MemoryError:
        lines = ["MemoryError\n"]
    sys.stderr.write("".join(lines))


# ── the launcher ──────────────────────────────────────────────────────────────────────────────────────────────────


class Launcher:
    """Forks programs, and answers for every process that comes of them."""

    def __init__(
        self, control: socket.socket, jail_folder: int | None = None, listener: socket.socket | None = None
    ) -> None:
        self._control = control
        self._jail_folder = jail_folder  # open; None outside a jail
        self._listener = listener  # for the host, not for us
        self._pid = os.getpid()
        self._pids: dict[int, int] = {}  # by run id
        self._runs: dict[int, int] = {}  # run id by pid
        self._landlock = landlock_version() if jail_folder is None else 0
        self._num_processes = 0  # of this user; 0: not known
        self._counted_s = float("-inf")
        self._wake_read, self._wake_write = os.pipe()

    def serve(self) -> None:
        """Until the host is gone."""
        if IS_LINUX:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans, daemons too, come to us to be killed
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, ignore_signal)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._greet()
        while True:
            ready, _, _ = select.select([self._wake_read, self._control], [], [])
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._reap()
            if self._control in ready and not self._take_request():
                return

    def kill_all(self) -> None:
        """Every program, and what is left of them."""
        pids = list(self._runs)
        self._runs.clear()
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        self._kill_strays()

    def _take_request(self) -> bool:
        """Do what the host asks; False when it is gone."""
        try:
            frame, descriptors, _, _ = socket.recv_fds(self._control, REQUEST.size, MAX_DESCRIPTORS)
        except ConnectionError:
            return False
        if len(frame) < REQUEST.size:
            return False
        kind, run_id = REQUEST.unpack(frame)
        if kind == RequestKind.START:
            self._start(run_id, descriptors)
        elif (pid := self._pids.get(run_id)) is not None:
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
                run_program(self._set_up(run_id, descriptors))
            self._pids[run_id] = pid
            self._runs[pid] = run_id
            self._report(ReportKind.STARTED, run_id, pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _set_up(self, run_id: int, descriptors: list[int]) -> dict[str, Any]:
        """In the child: give up everything, and return what to run."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(
                signal.SIGXFSZ, signal.SIG_DFL
            )  # Python ignores it: here it tells the host that files were too long
            request_fd, *standard = descriptors[:4]
            request = json.loads(os.pread(request_fd, os.fstat(request_fd).st_size, 0))
            for group in descriptors[4:]:
                os.write(group, b"0")  # this process, and with it all that come of it
            for target, descriptor in enumerate(standard):
                os.dup2(descriptor, target)
            os.chdir(request["folder"])
            self._confine(request)
        except BaseException as error:  # the boundary: nothing of the program has run, so the host is told
            self._report(ReportKind.FAILED, run_id, (error.errno if isinstance(error, OSError) else None) or 0)
            os._exit(1)
        os.closerange(3, 256)  # the launcher opens a dozen descriptors, of the lowest numbers that are free
        return request

    def _confine(self, request: dict[str, Any]) -> None:
        if IS_LINUX:
            drop_privileges()
            if self._landlock:
                restrict_to_folder(self._landlock)
            prctl(PR_SET_DUMPABLE, 1)  # the launcher of a jail is not
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._pid:
                os._exit(1)  # the launcher died before it could be watched
        os.chdir(request["cwd"])
        set_limits(request, self._num_processes)

    def _count_processes(self) -> None:
        """Root has no limit of processes in the kernel, and macOS no /proc: published in README.md."""
        now_s = time.monotonic()
        if IS_LINUX and os.getuid() != 0 and now_s - self._counted_s > PROCESS_COUNT_AGE_S:
            self._counted_s = now_s
            self._num_processes = count_user_tasks()

    def _reap(self) -> None:
        """Take the status of what has ended; report a program only when the rest of it is dead as well."""
        ended: list[tuple[int, int, resource.struct_rusage]] = []
        for pid, status, usage in exited_children():
            run_id = self._runs.pop(pid, None)
            if run_id is not None:
                del self._pids[run_id]
                kill_group(pid)
                ended.append((run_id, status, usage))
        self._kill_strays()
        for run_id, status, usage in ended:
            peak_bytes = usage.ru_maxrss * (1024 if IS_LINUX else 1)
            cpu_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
            self._report(ReportKind.ENDED, run_id, status, cpu_us, peak_bytes)

    def _kill_strays(self) -> None:
        """Kill the orphans of dead programs and the daemons of living ones, and what these leave in turn."""
        for _ in range(MAX_SWEEPS):
            strays = [pid for pid in children_of(self._pid) if self._is_stray(pid)]
            if not strays:
                return
            for pid in strays:
                kill_group(pid)
            for pid in strays:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _is_stray(self, pid: int) -> bool:
        """An orphan that is in the group of a running program dies with that program."""
        if pid in self._runs:
            return False
        try:
            return os.getpgid(pid) not in self._runs
        except ProcessLookupError:
            return False

    def _greet(self) -> None:
        descriptors = [] if self._jail_folder is None else [self._jail_folder]
        if self._listener is not None:
            descriptors.append(self._listener.fileno())
        with contextlib.suppress(ConnectionError):  # the host is gone: the next read says so
            socket.send_fds(self._control, [REPORT.pack(ReportKind.HELLO, 0, self._landlock, 0, 0)], descriptors)
        if self._listener is not None:
            self._listener.close()

    def _report(self, kind: ReportKind, run_id: int, value: int, cpu_us: int = 0, peak_bytes: int = 0) -> None:
        with contextlib.suppress(ConnectionError):  # the host is gone: the next read says so
            self._control.sendall(REPORT.pack(kind, run_id, value, cpu_us, peak_bytes))


def ignore_signal(_number: int, _frame: types.FrameType | None) -> None:
    """A handler must exist for the wake-up pipe to be written."""


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


def kill_group(pid: int) -> None:
    """A process and its group: it is killed by its own id too, for it may not have made its group yet."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """The children of a process of one thread; empty where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def control_socket(inherited: int) -> socket.socket:
    """The inherited socket under a low number, see `_set_up`."""
    control = socket.socket(fileno=os.dup(inherited))
    os.close(inherited)
    return control


def ready_interpreter() -> None:
    """Once, so that no program need pay for it."""
    site.setquit()  # `exit()` and `quit()`, which -S leaves out and programs use
    compile("", PROGRAM_FILE, "exec")  # the first compilation sets the compiler up: 1 ms
    gc.disable()  # nothing here makes cycles; a collection would copy the pages that children share
    gc.freeze()


def main() -> None:
    control, root = control_socket(int(sys.argv[1])), sys.argv[2]
    ready_interpreter()
    launcher = Launcher(control)
    launcher.serve()
    launcher.kill_all()
    os.execv("/bin/sh", ["sh", "-c", REMOVE, "sh", root])


if __name__ == "__main__":
    main()
