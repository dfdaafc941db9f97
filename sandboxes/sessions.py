"""Stateful sessions: Python programs that share one interpreter, and bash commands that share a shell's state.

A `PythonSession` is the host's end of `session_inside.py`. Printed text can never pass for a status. The kernel reports
how an interpreter died; whether a run raised is what the interpreter itself says, and a program could bend that.

Each run of a `ShellSession` is a process of its own, with its own limits, and the kernel gives its status. When a run
ends, bash saves variables, functions, aliases, options, umask and the current folder to a file of the sandbox for the
next run. A run that is killed, becomes another program (`exec`) or sets its own EXIT trap saves nothing. Background
jobs end with their run; start what must live on with `Sandbox.spawn`.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Self

from sandboxes.cell import Process
from sandboxes.link import END_PATIENCE_S
from sandboxes.session_inside import ENDING, INTERRUPT, MARK_BYTES, REQUEST
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
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise ValueError(f"source is {source!r:.100}; give Python source as text")
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


@dataclass(eq=False)
class Output:
    """What comes over one stream of an interpreter."""

    chunks: AsyncIterator[bytes]
    unread: bytearray = field(default_factory=bytearray)  # may hold the beginning of an ending
    printed: bytearray = field(default_factory=bytearray)  # by the current run
    ending: bytes | None = None  # of the current run


class Interpreter:
    """One interpreter in its sandbox, from its start to its death."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._outputs = (Output(process.stdout), Output(process.stderr))
        self._room = 0
        self._is_truncated = False

    async def run(self, source: str, limits: Limits) -> ExecResult:
        for output in self._outputs:
            output.printed, output.ending = bytearray(), None
        self._room, self._is_truncated = limits.output_bytes, False
        started_s = monotonic()
        verdict: Status | None = None
        mark, data = secrets.token_bytes(MARK_BYTES), source.encode("utf-8", "surrogatepass")
        try:
            async with asyncio.timeout(limits.wall_s) as self._deadline:
                await self._send(REQUEST.pack(mark, len(data)) + data)
                ending = await self._until(mark)
        except TimeoutError:
            verdict = Status.OUTPUT_LIMIT if self._is_truncated else Status.TIMEOUT
            ending = await self._interrupt(mark)
        if ending is None:
            result = await self._end()
            status = result.status if result.status is Status.MEMORY else verdict or result.status
        else:
            code, cpu_s, peak_bytes = ENDING.unpack(ending)
            status = verdict or (Status.NONZERO if code else Status.OK)
            result = ExecResult(status=status, exit_code=code, cpu_s=cpu_s, peak_memory_bytes=peak_bytes)
        return replace(
            result,
            status=status,
            stdout=bytes(self._outputs[0].printed),
            stderr=bytes(self._outputs[1].printed),
            truncated=self._is_truncated,
            wall_s=monotonic() - started_s,
            is_state_lost=ending is None,
        )

    async def _end(self) -> ExecResult:
        """Return how the interpreter died. One that only gave up its streams, to which it cannot answer, is killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_PATIENCE_S):
                return await self.process.wait()
        await self.process.kill()
        return await self.process.wait()

    async def _send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is dead, and the end of its output says so
            await self.process.write(data)

    async def _interrupt(self, mark: bytes) -> bytes | None:
        """Interrupt a run and return its ending; None if it did not end in time and the interpreter was killed."""
        try:
            async with asyncio.timeout(INTERRUPT_GRACE_S):
                await self._send(INTERRUPT)
                return await self._until(mark)
        except TimeoutError:
            await self.process.kill()
            await self._until(mark)
            return None

    async def _until(self, mark: bytes) -> bytes | None:
        """Read both streams to the mark and return the run's ending; None if the interpreter died before."""
        await asyncio.gather(*(self._read(output, mark) for output in self._outputs))
        stdout, stderr = self._outputs
        return stdout.ending and stderr.ending

    async def _read(self, output: Output, mark: bytes) -> None:
        if output.ending is not None:
            return
        while (end := output.unread.find(mark) - ENDING.size) < 0:
            self._keep(output, len(output.unread) - ENDING.size - MARK_BYTES)
            chunk = await anext(output.chunks, b"")
            if not chunk:
                self._keep(output, len(output.unread))
                return
            output.unread += chunk
        self._keep(output, end)
        output.ending = bytes(output.unread[: ENDING.size])
        del output.unread[: ENDING.size + MARK_BYTES]

    def _keep(self, output: Output, num_bytes: int) -> None:
        """Keep as much as there is room for of what was printed; when there is none left, the run's time is over."""
        data = output.unread[: max(0, num_bytes)]
        del output.unread[: len(data)]
        output.printed += data[: self._room]
        if len(data) > self._room:
            self._is_truncated = True
            if not self._deadline.expired():
                self._deadline.reschedule(0)
        self._room = max(0, self._room - len(data))


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
        if len(command.encode(errors="surrogatepass")) > MAX_COMMAND_BYTES:
            raise ValueError(f"the command is longer than {MAX_COMMAND_BYTES} bytes; write it to a file, and run that")
        async with self._turn:
            return await self._execute(["bash", "-c", self._script, "bash", command], stdin=stdin, limits=limits)
