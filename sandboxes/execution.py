"""One program that a launcher runs, from its start to its end: the deadline, the kill, the streams and the verdict.

`Execution` starts a program through its launcher (`link.py`) and decides how it ended, with the counters of its control
group where the backend has one. `BoundedOutput` collects the output of a program that runs to its end, up to a bound.
"""

import asyncio
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

from sandboxes.cgroups import ControlGroup
from sandboxes.link import Ended, LauncherLink, Run
from sandboxes.spec import ExecResult, Limits, Status

GRACE_S = 5.0
"""A launcher is killed if it does not report the end of a killed program within this time, or the start of a program
within its wall-clock limit plus this time."""
NEARLY_ALL_MEMORY = 0.9
"""Without a control group, a failed program ran out of memory if it had this share of its limit resident."""
NEARLY_ALL_CPU = 0.75
"""A program killed at its CPU limit may seem to have used only this share, where a virtual machine was held up."""
CHUNK_BYTES = 65_536
PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"


class Execution:
    """One program: `start` it, `wait` for its end, ask for its `result`. `limits.wall_s` applies only if `is_timed`."""

    def __init__(
        self, link: LauncherLink, limits: Limits, group: ControlGroup | None, *, is_timed: bool = True
    ) -> None:
        self._link = link
        self._limits = limits
        self._group = group
        self._is_timed = is_timed
        self._loop = asyncio.get_running_loop()
        self._run: Run | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._verdict: Status | None = None  # set by the host when it has the program killed

    @property
    def is_running(self) -> bool:
        return self._run is not None and not self._run.ended.done()

    def start(self, request: bytes, standard: Sequence[int], turn: ExitStack) -> None:
        """Send the program to the launcher.

        `request` is what the launcher reads. `standard` are stdin, stdout and stderr, which the caller still owns.
        """
        descriptor = sealed_file(request)
        try:
            groups = self._group.descriptors if self._group else ()
            self._run = self._link.run([descriptor, *standard, *groups], turn)
        finally:
            os.close(descriptor)
            if self._group is not None:
                self._group.close()

    async def wait(self) -> Ended:
        """Wait for the end, which comes by the deadline. Cancelling kills the program without waiting for its death."""
        assert self._run is not None
        if self._is_timed:
            self._timer = self._loop.call_later(self._limits.wall_s, self._on_time)
        try:
            return await asyncio.shield(self._run.ended)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._send_kill()

    def stop(self, verdict: Status) -> None:
        """Kill the program for a reason, which becomes its status."""
        self._verdict = self._verdict or verdict
        self._send_kill()

    async def kill(self) -> None:
        """Kill the program and wait until it is dead; a launcher that does not answer is killed too."""
        if self._run is None:
            return
        self._send_kill()
        done, _ = await asyncio.wait([self._run.ended], timeout=GRACE_S)
        if not done:
            self._link.abandon()

    def result(
        self, ended: Ended, stdout: bytes = b"", stderr: bytes = b"", *, is_truncated: bool = False
    ) -> ExecResult:
        """Return the result with the output that was kept. Call this before the control group is gone."""
        assert self._run is not None
        return result_of(
            ended,
            stdout,
            stderr,
            self._limits,
            verdict=self._verdict,
            is_truncated=is_truncated,
            wall_s=self._loop.time() - self._run.started_s,
            oom_kills=0 if self._group is None else self._group.num_oom_kills(),
            was_refused_processes=self._group is not None and self._group.was_refused_processes(),
            has_group=self._group is not None,
        )

    def _on_time(self) -> None:
        """Enforce the deadline, which counts from the program's start, however late that was; see `GRACE_S`."""
        assert self._run is not None
        is_started = self._run.pid is not None
        left_s = self._run.started_s + self._limits.wall_s + GRACE_S * (not is_started) - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._on_time)
        elif is_started:
            self.stop(Status.TIMEOUT)
            self._timer = self._loop.call_later(GRACE_S, self._link.abandon)
        else:
            self._link.abandon()

    def _send_kill(self) -> None:
        if self._run is not None and self.is_running:
            if self._group is not None:
                self._group.kill()  # directly: a launcher among many busy programs may not get the CPU to do it
            self._link.kill(self._run)


def result_of(
    ended: Ended,
    stdout: bytes,
    stderr: bytes,
    limits: Limits,
    *,
    verdict: Status | None,
    is_truncated: bool,
    wall_s: float,
    oom_kills: int = 0,
    was_refused_processes: bool = False,
    has_group: bool = True,
) -> ExecResult:
    """Return the result of a program. `verdict` is the reason for which the host had it killed, if it did.

    What its control group counted goes before this reason. Nothing that the program printed can make it OK.
    """
    code = os.waitstatus_to_exitcode(ended.wait_status)
    if oom_kills:
        status = Status.MEMORY
    elif was_refused_processes:
        status = Status.PIDS
    else:
        status = verdict or status_of(code, ended, stderr, limits, has_group=has_group)
    return ExecResult(
        status=status,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=stdout,
        stderr=stderr,
        truncated=is_truncated,
        wall_s=wall_s,
        cpu_s=ended.cpu_s,
        peak_memory_bytes=ended.peak_memory_bytes,
        oom_kills=oom_kills,
    )


def status_of(code: int, ended: Ended, stderr: bytes, limits: Limits, *, has_group: bool = False) -> Status:
    """Return the status of a program that the host did not kill; `code` is its exit code, or minus its signal.

    Only the kernel decides whether it is OK. The reason for a failure is partly read from what the program did: it may
    pass off one failure as another, never as success. Running out of address space or disk has no signal of its own, so
    the last line of stderr is searched for signs of it.
    """
    if code == 0:
        return Status.OK
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and ended.cpu_s >= NEARLY_ALL_CPU * limits.max_cpu_s):
        return Status.TIMEOUT
    if code == -signal.SIGXFSZ:
        return Status.DISK
    last_line = stderr.rstrip(b"\n").rpartition(b"\n")[2]
    if last_line.startswith(b"MemoryError"):
        return Status.MEMORY
    if not has_group and ended.peak_memory_bytes >= NEARLY_ALL_MEMORY * limits.memory_bytes:
        return Status.MEMORY
    if b"No space left on device" in last_line:
        return Status.DISK
    return Status.NONZERO if code > 0 else Status.SIGNALED


def base_environment(home: str) -> dict[str, str]:
    """Return the environment of a program whose working directory it sees as `home`.

    >>> sorted(base_environment("/work"))
    ['HOME', 'PATH', 'TMPDIR']
    """
    return {"PATH": PROGRAM_PATH, "HOME": home, "TMPDIR": home}


def sealed_file(data: bytes) -> int:
    """Return a descriptor, at offset 0, of an anonymous file that holds `data` and that its reader cannot change."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            return os.dup(file.fileno())
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    at = 0
    while at < len(data):
        at += os.write(descriptor, data[at:] if at else data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor


class BoundedOutput:
    """Two pipes, for stdout and stderr, of which at most `max_bytes` together are kept.

    Use it as a context manager: leaving it closes its descriptors. `on_overflow` is called once if more is printed.
    """

    def __init__(self, max_bytes: int, on_overflow: Callable[[], None]) -> None:
        self.is_truncated = False
        self.write_ends: list[int] = []  # they become the program's stdout and stderr
        self._loop = asyncio.get_running_loop()
        self._room = max_bytes
        self._on_overflow = on_overflow
        self._chunks: dict[int, list[bytes]] = {}  # by read end

    def __enter__(self) -> Self:
        try:
            for _ in ("stdout", "stderr"):
                read_end, write_end = os.pipe()
                self.write_ends.append(write_end)
                self._chunks[read_end] = []
                os.set_blocking(read_end, False)
                self._loop.add_reader(read_end, self._read, read_end)
        except OSError:  # out of descriptors: the first pipe must not leak
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close_write_ends()
        for read_end in self._chunks:
            self._loop.remove_reader(read_end)
            os.close(read_end)

    def close_write_ends(self) -> None:
        """Close the host's copies of the write ends, once the program has them."""
        while self.write_ends:
            os.close(self.write_ends.pop())

    def collect(self) -> tuple[bytes, bytes]:
        """Return all that was printed; call this when the program has ended.

        The pipes are read without waiting, so a process that outlived its program and keeps one open delays nobody.
        """
        for read_end in self._chunks:
            while not self.is_truncated and self._read(read_end):
                pass
        stdout, stderr = (b"".join(chunks) for chunks in self._chunks.values())
        return stdout, stderr

    def _read(self, read_end: int) -> bool:
        """Read once, and return whether there may be more."""
        try:
            data = os.read(read_end, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(read_end)
        kept = data[: self._room]
        self._room -= len(kept)
        self._chunks[read_end].append(kept)
        if len(kept) < len(data):
            self.is_truncated = True
            for end in self._chunks:
                self._loop.remove_reader(end)
            self._on_overflow()
        return bool(data)
