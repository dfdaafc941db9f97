"""Stateful sessions: Python programs that share one interpreter, and bash commands that share a shell's state.

A `PythonSession` is the host's end of `session_inside.py` and behaves as the cells of a notebook do. A run that is out
of time is interrupted as by Ctrl-C; if it does not end then, the interpreter is killed, `ExecResult.is_state_lost` is
set, and the next run gets a fresh one. Printed text can never pass for a status. The kernel reports how an interpreter
died; whether a run raised is what the interpreter itself says, and a program could bend that.

Each run of a `ShellSession` is a process of its own, with its own limits, and the kernel gives its status. When a run
ends, bash saves variables, functions, aliases, options, umask and the current folder to a file of the sandbox for the
next run. A run that is killed, becomes another program (`exec`) or sets its own EXIT trap saves nothing. Background
jobs end with their run; start what must live on with `Sandbox.spawn`.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Self

from sandboxes.agent.wire import whole_frames
from sandboxes.base import Process
from sandboxes.session_inside import DONE, ENDING, FRAME, INTERRUPT, RUN, STDERR, STDOUT
from sandboxes.spec import ExecResult, Limits, Status

SESSION_SOURCE = Path(__file__).with_name("session_inside.py").read_text()
INTERRUPT_GRACE_S = 0.5
"""The time that an interrupted run has to end."""


class PythonSession:
    """Runs one program after another; a call made meanwhile waits. It ends with its sandbox or with `close`.

    Use it as `async with box.python() as python: await python.run("x = 1"); await python.run("print(x)")`.
    """

    def __init__(
        self,
        start: Callable[[Limits], Awaitable[Process]],
        check_open: Callable[[], None],
        limits: Limits,
        slots: asyncio.Semaphore,
    ) -> None:
        self._start = start
        self._check_open = check_open
        self._limits = limits
        self._slots = slots
        self._turn = asyncio.Lock()
        self._interpreter: Interpreter | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def run(self, source: str, *, limits: Limits | None = None) -> ExecResult:
        """Run Python source. Cancelling it kills the interpreter.

        Wall-clock time and output in `limits` may differ per run; the rest is fixed when the session starts.
        """
        limits = limits or self._limits
        if replace(limits, wall_s=self._limits.wall_s, output_bytes=self._limits.output_bytes, cpu_s=None) != replace(
            self._limits, cpu_s=None
        ):
            raise ValueError("only wall_s and output_bytes can differ from run to run; give the rest to `python()`")
        async with self._turn, self._slots:
            if self._interpreter is None:
                self._interpreter = Interpreter(await self._start(self._limits))
            try:
                result = await self._interpreter.run(source, limits)
            except BaseException:
                await self.close()
                raise
            if result.is_state_lost:
                await self.close()
                self._check_open()  # if the sandbox was closed, that killed the interpreter, not the program
            return result

    async def close(self) -> None:
        """End the interpreter. Harmless when it has ended; a later run starts a fresh one."""
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.process.kill()


class Interpreter:
    """One interpreter in its sandbox, from its start to its death."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._received = bytearray()
        self._printed: dict[int, list[bytes]] = {}  # by the current run, by kind
        self._room = 0
        self._is_truncated = False

    async def run(self, source: str, limits: Limits) -> ExecResult:
        self._printed, self._room, self._is_truncated = {STDOUT: [], STDERR: []}, limits.output_bytes, False
        started_s = monotonic()
        verdict: Status | None = None
        ending: bytes | None = None
        try:
            async with asyncio.timeout(limits.wall_s):
                await self._send(RUN, source.encode("utf-8", "surrogateescape"))
                ending = await self._until_done(is_bounded=True)
            if ending is None and self._is_truncated:
                verdict = Status.OUTPUT_LIMIT
        except TimeoutError:
            verdict = Status.TIMEOUT
        if verdict is not None:
            ending = await self._interrupt()
        if ending is None:
            ended = await self.process.wait()
            status = ended.status if ended.status is Status.MEMORY else verdict or ended.status
            result = replace(ended, status=status, is_state_lost=True)
        else:
            code, cpu_s, peak_bytes = ENDING.unpack(ending)
            result = ExecResult(
                status=verdict or (Status.NONZERO if code else Status.OK),
                exit_code=code,
                signal=None,
                stdout=b"",
                stderr=b"",
                truncated=False,
                wall_s=0.0,
                cpu_s=cpu_s,
                peak_memory_bytes=peak_bytes,
            )
        return replace(
            result,
            stdout=b"".join(self._printed[STDOUT]),
            stderr=b"".join(self._printed[STDERR]),
            truncated=self._is_truncated,
            wall_s=monotonic() - started_s,
        )

    async def _send(self, kind: int, data: bytes = b"") -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, and the end of its output says so
            await self.process.write(FRAME.pack(kind, 0, len(data)) + data)

    async def _interrupt(self) -> bytes | None:
        """Interrupt a run and return its ending; None if it did not end in time and the interpreter was killed."""
        try:
            async with asyncio.timeout(INTERRUPT_GRACE_S):
                await self._send(INTERRUPT)
                return await self._until_done(is_bounded=False)
        except TimeoutError:
            await self.process.kill()
            return None

    async def _until_done(self, *, is_bounded: bool) -> bytes | None:
        """Return a run's ending; None if the interpreter died first, or printed too much and `is_bounded`."""
        while True:
            for kind, _, data in whole_frames(self._received):
                if kind == DONE:
                    return data
                self._is_truncated = self._is_truncated or len(data) > self._room
                self._printed[STDOUT if kind == STDOUT else STDERR].append(data[: self._room])
                self._room -= len(data[: self._room])
                if is_bounded and self._is_truncated:
                    return None
            chunk = await anext(self.process.stdout, b"")
            if not chunk:
                return None
            self._received += chunk


MAX_COMMAND_BYTES = 100_000
"""A little less than Linux accepts as one argument."""
RUN_COMMAND = r"""
__state=${TMPDIR:-/tmp}/.shell-KEY
trap '
    {
        compgen -v | while IFS= read -r __name; do
            case $__name in
                BASH*|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|PWD) ;;
                RANDOM|SECONDS|SHELLOPTS|SHLVL|SRANDOM|UID|_|__name|__state) ;;
                *) declare -p "$__name" || : ;;
            esac
        done || :
        declare -f
        alias -p
        umask -p
        printf "builtin cd -- %q || :\n" "$PWD"
        shopt -p || :
        set +o
        command mv -f "$__state.new" "$__state"
    } >| "$__state.new" 2> /dev/null
' EXIT
eval "shift; if [ -r \"\$__state\" ]; then . \"\$__state\" 2> /dev/null; fi
$1"
"""


class ShellSession:
    """Runs one command after another with `Sandbox.exec`; a call made meanwhile waits. There is nothing to close.

    Use it as `async with box.shell() as shell: await shell.run("cd src"); await shell.run("pwd")`.
    """

    def __init__(self, execute: Callable[..., Awaitable[ExecResult]]) -> None:
        self._execute = execute
        self._script = RUN_COMMAND.replace("KEY", secrets.token_hex(8))
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def run(self, command: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run bash commands. In a sandbox without bash the exit code is 127."""
        if len(command.encode(errors="surrogateescape")) > MAX_COMMAND_BYTES:
            raise ValueError(f"the command is longer than {MAX_COMMAND_BYTES} bytes; write it to a file, and run that")
        async with self._turn:
            return await self._execute(["bash", "-c", self._script, "bash", command], stdin=stdin, limits=limits)
