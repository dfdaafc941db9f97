"""One program, from its start to its result: the deadline, the bound on output, and the judgement of its end.

It knows the launcher (`link.py`) and a control group when the backend has one; it knows no backend.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sandboxes.folder import relative_parts
from sandboxes.limits import Limits
from sandboxes.link import Ended, LauncherLink, Run
from sandboxes.output import BoundedOutput
from sandboxes.result import ExecResult, Status

KILL_GRACE_S = 5.0
"""A launcher that has not reported the end of a killed program by then is killed itself."""
NEARLY_ALL_MEMORY = 0.9
"""Without a control group: a failed program that had this share of its limit resident failed for want of memory."""


def program_of(argv: Sequence[str], cwd: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """A program as the launcher reads it. Raises ValueError for what is none, or for a folder outside of the work's."""
    if isinstance(argv, str) or not argv:
        raise ValueError(f"argv is {argv!r}; give the program and its arguments as a list of strings")
    if cwd not in (None, "."):
        relative_parts(cwd)
    return {"argv": list(argv), "cwd": cwd or ".", "env": dict(env)}


class Group(Protocol):
    """What bounds all processes of one program together."""

    @property
    def descriptors(self) -> list[int]:
        """What a process writes to, to join."""
        ...

    def close_descriptors(self) -> None: ...

    def forbid_forks(self) -> None:
        """From here on the program can only end."""
        ...

    def num_oom_kills(self) -> int: ...

    def was_refused_processes(self) -> bool: ...


class Execution:
    """One program."""

    def __init__(self, link: LauncherLink, limits: Limits, group: Group | None = None) -> None:
        self._link = link
        self._limits = limits
        self._group = group
        self._run: Run | None = None
        self._verdict: Status | None = None  # of the host: why it had the program killed

    @property
    def is_running(self) -> bool:
        return self._run is not None and not self._run.ended.done()

    async def run(self, request: bytes, stdin: bytes) -> ExecResult:
        """Cancelling it kills the program, and does not wait for its death."""
        with BoundedOutput(self._limits.output_bytes, self._on_overflow) as output:
            self._run = self._start(request, stdin, output)
            started_s = time.monotonic()
            try:
                await self._wait_for_end()
            finally:
                self._kill_run()
            ended, wall_s = self._run.ended.result(), time.monotonic() - started_s
            stdout, stderr = output.collect()
            return self._result(ended, stdout, stderr, wall_s, is_truncated=output.is_truncated)

    async def kill(self) -> None:
        """Kill the program and wait until it is dead; a launcher that does not answer is killed with it."""
        if self._run is None:
            return
        self._kill_run()
        done, _ = await asyncio.wait([self._run.ended], timeout=KILL_GRACE_S)
        if not done:
            self._link.abandon()

    def _start(self, request: bytes, stdin: bytes, output: BoundedOutput) -> Run:
        with contextlib.ExitStack() as stack:
            descriptors: list[int] = []
            for data in (request, stdin):
                descriptors.append(sealed_file(data))
                stack.callback(os.close, descriptors[-1])
            groups: list[int] = []
            if self._group is not None:
                groups = self._group.descriptors
                stack.callback(self._group.close_descriptors)
            run = self._link.run([*descriptors, *output.write_ends, *groups])
            output.close_write_ends()
            return run

    def _kill_run(self) -> None:
        if self._run is not None and self.is_running:
            if self._group is not None:
                self._group.forbid_forks()
            self._link.kill(self._run)

    async def _wait_for_end(self) -> None:
        assert self._run is not None
        done, _ = await asyncio.wait([self._run.ended], timeout=self._limits.wall_s)
        if not done:
            self._verdict = self._verdict or Status.TIMEOUT
            await self.kill()

    def _on_overflow(self) -> None:
        self._verdict = self._verdict or Status.OUTPUT_LIMIT
        self._kill_run()

    def _result(self, ended: Ended, stdout: bytes, stderr: bytes, wall_s: float, *, is_truncated: bool) -> ExecResult:
        code = os.waitstatus_to_exitcode(ended.wait_status)
        status = self._verdict or status_of(code, ended, stderr, self._limits, has_group=self._group is not None)
        oom_kills = 0
        if self._group is not None:
            oom_kills = self._group.num_oom_kills()
            if oom_kills:
                status = Status.MEMORY
            elif self._group.was_refused_processes():
                status = Status.PIDS
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
    """The status of a program that the host did not have killed; `code` is its exit code, or minus its signal.

    Whether it is OK comes from the kernel alone. Why it failed is partly read from what it did: a program may pass
    off its failure as another, never as success. Neither address space nor a full disk has a signal of its own, hence
    the signs of them.
    """
    if code == 0:
        return Status.OK
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and ended.cpu_s >= limits.max_cpu_s):
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


def sealed_file(data: bytes) -> int:
    """A descriptor of an anonymous file that holds `data`, at its start, and that its reader cannot change."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            return os.dup(file.fileno())
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor
