"""A process: its log, its limits, its clock; the child processes of a run, and work that no cancellation may cut.

A child is started with a log file, is watched, and never outlives its parent: it holds the read end of a pipe, its
*lifeline*, whose write end only the parent has. However the parent ends, SIGKILL included, the pipe closes and
`exit_with_parent` ends the child.

The signals that ask a command to end are heard by a thread, and handled by Python rather than by an event loop, so that
a loop that is blocked is interrupted and ended like any other.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

from areal_agent.errors import ProcessDied

Result = TypeVar("Result")


class TimeOfDay:
    """The Unix time of a process, in seconds. Where the system's clock is set back, it goes on from where it was.

    >>> system = iter([10.0, 12.0, 5.0, 6.0])
    >>> now_s = TimeOfDay(lambda: next(system))
    >>> [now_s() for _ in range(4)]
    [10.0, 12.0, 12.0, 13.0]
    """

    def __init__(self, system_s: Callable[[], float]) -> None:
        self._system_s = system_s
        self._ahead_s = self._last_s = 0.0

    def __call__(self) -> float:
        now_s = self._system_s() + self._ahead_s
        if now_s < self._last_s:
            self._ahead_s += self._last_s - now_s
        self._last_s = max(self._last_s, now_s)
        return self._last_s


time_of_day_s = TimeOfDay(time.time)
"""What records are stamped with, so that none ends before it began."""

LIFELINE_VARIABLE = "AREAL_AGENT_LIFELINE_FD"

ENDING_WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""Goes before a command without a lifeline, even one that is stopped, so that it ends with this process. Linux only."""

NEW_OBJECTS_A_COLLECTION = 50_000


_LIKE_A_KEY = re.compile(r"sk-[\w-]{12,}")
"""What every key of a gateway looks like, and those of OpenAI and Anthropic."""


def hide_keys(text: str) -> str:
    """Return a text for a log, a record or an answer, without anything that looks like a key.

    >>> hide_keys("Bearer sk-0123456789abcdef is refused")
    'Bearer sk-*** is refused'
    """
    return _LIKE_A_KEY.sub("sk-***", text)


class _KeylessFormatter(logging.Formatter):
    """Writes records and tracebacks without keys: errors of libraries, and of users, may name them."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_keys(super().format(record))


FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

CHATTY = ("aiohttp.access", "httpcore", "httpx", "openai")
"""Libraries that log a line per request: thousands a minute here. Their warnings are kept."""


class _Shown(logging.Handler):
    """Shows warnings to a person, without their tracebacks, which are in the file."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(hide_keys(f"{record.levelname.lower()}: {record.getMessage()}"))


class _LogFile(logging.FileHandler):
    """A log that drops what its disk has no room for: a traceback for each line would hide the error of the run."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def start_logging(path: Path | None = None, show: Callable[[str], None] | None = None) -> None:
    """Append everything that this process logs to `path`, or write it to its output. A process's entry point calls it.

    Every warning and error is also passed to `show`, as one text.
    """
    handlers = None if path is None else [_LogFile(path, encoding="utf-8")]
    logging.basicConfig(handlers=handlers, level=logging.INFO, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_KeylessFormatter(FORMAT))
    logging.captureWarnings(True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    if show is not None:
        logging.getLogger().addHandler(_Shown(show))


def peak_memory_bytes(pid: int) -> int | None:
    """Return the peak of a process's resident memory; None when the process is gone or the system is not Linux."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    marks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(marks[0]) * 1024 if marks else None


def exit_with_parent() -> None:
    """End this process as soon as its parent is gone. A child calls it at its start.

    It does nothing in a process that a person started. Ctrl-C in a terminal reaches every process in the foreground; a
    child ignores it and leaves the decision to its parent.
    """
    lifeline = os.environ.get(LIFELINE_VARIABLE)
    if lifeline is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fd = int(lifeline)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())  # SIGIO at its end: the kernel's own, for C code may let no thread run
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_wait_for_end, args=(fd,), name="lifeline", daemon=True).start()


def _wait_for_end(fd: int) -> NoReturn:
    while os.read(fd, 1):
        pass
    os._exit(1)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals that ask a run to save and to end. Slurm can send SIGUSR1 before a time limit."""

INTERRUPTED_CODE = 130

SAME_SIGNAL_S = 1.0
"""Signals within this time count as one: `timeout` and job managers signal a process, and then its group."""


@contextmanager
def ended_by_signals(heard: Callable[[], object], tell: Callable[[str], None]) -> Generator[None]:
    """Inside, a signal that asks to end calls `heard`, and the first one `tell`, in a thread, with the signal's name.

    A second one ends the process at once; its children see their lifeline close and end themselves. `heard` may
    interrupt anything in the main thread: it must not print, nor take a lock. A SIGHUP that is ignored, as under nohup,
    stays so.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    threading.Thread(target=_hear_signals, args=(read_end, tell), name="signals", daemon=True).start()

    def handle(*_: object) -> None:
        heard()

    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [one for one in ENDING_SIGNALS if not (one == signal.SIGHUP and is_ignored)]
    handlers = {number: signal.signal(number, handle) for number in numbers}
    wakeup_fd = signal.set_wakeup_fd(write_end)  # written to by C, whatever the main thread does
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(write_end)


def _hear_signals(read_end: int, tell: Callable[[str], None]) -> None:
    first_s: float | None = None
    with open(read_end, "rb", buffering=0) as received:
        while number := received.read(1):
            if number[0] not in ENDING_SIGNALS:
                continue
            if first_s is None:
                first_s = time.monotonic()
                # in a thread of its own: what it writes to may be stuck
                threading.Thread(target=tell, args=(signal.Signals(number[0]).name,), daemon=True).start()
            elif time.monotonic() - first_s >= SAME_SIGNAL_S:
                os._exit(INTERRUPTED_CODE)


def collect_garbage_rarely() -> None:
    """Collect garbage seldom, and never the objects that exist by now. A server calls it once it is built.

    Every request makes some thousand short-lived objects and rarely a cycle. At Python's own threshold of 700 the
    search for cycles takes a sixth of a gateway's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS_A_COLLECTION, 20, 20)


def return_free_memory() -> None:
    """Give freed memory back to the system, where the C library can do that (glibc).

    Bodies and prompts of long conversations are freed between objects that stay. Without this, the holes that they
    leave grow as large as the conversations themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allow_many_connections() -> None:
    """Raise the limit on open files as far as allowed: the usual 1,024 is less than one batch of rollouts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS reports an infinite limit but accepts less
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def how_it_ended(exit_status: int) -> str:
    """Say how a process ended; a negative status is the signal that killed it.

    >>> how_it_ended(3), how_it_ended(-9)
    ('exited with 3', 'was killed by SIGKILL')
    """
    return f"was killed by {signal.Signals(-exit_status).name}" if exit_status < 0 else f"exited with {exit_status}"


def death_of(name: str, how: str, log_path: Path) -> ProcessDied:
    """Return the error that says how the process of that name ended, with its last log lines."""
    return ProcessDied(f"the {name} process {how}; the end of {log_path}:\n{last_lines(log_path)}")


def last_lines(path: Path, num_lines: int = 12) -> str:
    """Return the last lines of a log, indented."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 16_384))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-num_lines:]) or "    (nothing was logged)"


class ManagedProcess:
    """One child process. `start` makes it and `aclose` ends it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, lifeline: int, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._lifeline: int | None = lifeline

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start `argv` in a session of its own, with its output appended to `log_path`."""
        read_end, write_end = os.pipe()
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(env or {}), LIFELINE_VARIABLE: str(read_end)},
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(name, process, write_end, log_path)

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative if a signal killed it."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        return self._process.pid

    async def died(self) -> ProcessDied:
        """Wait until the process ends by itself; return an error with its exit status and its last log lines."""
        return death_of(self.name, how_it_ended(await self._process.wait()), self.log_path)

    def log_tail(self, num_lines: int = 12) -> str:
        """Return the last lines of the log, indented."""
        return last_lines(self.log_path, num_lines)

    def kill(self) -> None:
        """Send SIGKILL to a process that does not answer. `died` returns once it is gone."""
        if self.is_running:
            self._process.kill()

    async def aclose(self, grace_s: float = 5.0, *, with_session: bool = False) -> None:
        """End the process: SIGTERM, then SIGKILL after `grace_s`, or at once if cancelled. Harmless when it has ended.

        `with_session` also kills the processes that it has left behind, which are of its session.
        """
        try:
            if self.is_running:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            if with_session:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None
        await self._process.wait()


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run `work` beside the body; it is cancelled on leaving."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def uninterrupted(work: Awaitable[Result]) -> Result:
    """Await `work` to its end even when cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # a failure elsewhere may cancel once more while a signal's cancellation waits here
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # mark its error as seen: the cancellation is what is raised
        raise


def count_cancellations() -> int:
    """Return how often the task that runs here was cancelled; it may live on after that."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The memory limit of a container and what it uses, in cgroup version 2 and 1."""


def machine_memory() -> tuple[int, int | None]:
    """Return the bytes of memory of this machine or container, and those free for new use now; None: not known.

    What a container holds of files counts as used, though some of it could be taken back.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = _read("/proc/meminfo").splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    for limit, used in ([_read(path).strip() for path in group] for group in CGROUPS):
        if limit.isdigit() and int(limit) < total:
            total = int(limit)
            free = max(0, min(free, total - int(used))) if free is not None and used.isdigit() else None
    return total, free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
