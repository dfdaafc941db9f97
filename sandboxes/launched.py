"""A cell whose programs are run by a launcher: the same for every backend that has one.

What differs between those backends is the `Ground` that the programs stand on. `SpawnedProcess` is a program that the
host talks with while it runs.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from functools import partial
from io import FileIO
from pathlib import PurePosixPath
from typing import Any, Protocol, Self, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import Process, Program
from sandboxes.cgroups import ControlGroup
from sandboxes.execution import CHUNK_BYTES, BoundedOutput, Execution, base_environment, sealed_file
from sandboxes.folder import OpenFolder, entries_of, pack
from sandboxes.link import LauncherLink
from sandboxes.spec import ExecResult, Limits, Status

Answer = TypeVar("Answer")
MAX_PIPE_BYTES = 1 << 20


class Ground(Protocol):
    """The place where the programs of one cell run, and the bounds on them."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def home(self) -> str:
        """The working directory, as programs see it."""
        ...

    @property
    def env(self) -> Mapping[str, str]:
        """The environment that programs find beside PATH, HOME and TMPDIR."""
        ...

    async def link(self) -> LauncherLink:
        """Return the launcher to use now; SandboxError when there is none any more."""
        ...

    def group(self, limits: Limits) -> AbstractAsyncContextManager[ControlGroup | None]:
        """Return a bound on all processes of one program together, or None where there is none."""
        ...

    def limits_of_process(self, limits: Limits, *, has_group: bool) -> dict[str, int | None]:
        """Return the limits of each process on memory ("address_space_bytes") and process count ("new_processes").

        None leaves a resource unbounded. SandboxError or ValueError for a limit that cannot be enforced.
        """
        ...

    async def with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        """Run `act` on the working folder, in a thread."""
        ...

    async def aclose(self) -> None:
        """Give the ground up with all that is in it; no program runs any more."""
        ...


class Cells:
    """The cells of one provider. `release` gives up what the provider holds, once all cells are closed."""

    def __init__(self, release: Callable[[], Awaitable[None]]) -> None:
        self._release = release
        self._open: set[LaunchedCell] = set()
        self._closing: asyncio.Task[None] | None = None

    def check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox pool is closed; open another")

    async def add(self, ground: Ground, limits: Limits) -> "LaunchedCell":
        if self._closing is not None:
            await ground.aclose()
            raise SandboxError("the sandbox pool was closed")
        cell = LaunchedCell(ground, limits, self._open.discard)
        self._open.add(cell)
        return cell

    async def close(self) -> None:
        """Close every cell, then the provider. Harmless when both are closed already."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(cell.close() for cell in self._open))
        await self._release()


class LaunchedCell:
    """Programs on a ground. `on_closed` is called once, when everything is gone."""

    def __init__(self, ground: Ground, limits: Limits, on_closed: Callable[["LaunchedCell"], None]) -> None:
        self._ground = ground
        self._limits = limits
        self._on_closed = on_closed
        self._env = {**base_environment(ground.home), **ground.env}
        self._executions: set[Execution] = set()
        self._spawned: set[SpawnedProcess] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._closing is None and self._ground.is_alive

    async def exec(self, program: Program, *, stdin: bytes, limits: Limits) -> ExecResult:
        link = await self._ground.link()
        async with link.turn() as turn, self._ground.group(limits) as group:
            request = self._request(program, limits, has_group=group is not None)
            execution = Execution(link, limits, group)
            self._executions.add(execution)
            try:
                result = await self._run(execution, turn, request, stdin, limits.output_bytes)
            except OSError as error:  # of this process, which may have too many open files; the program did nothing
                raise SandboxError(f"a program could not be run: {error}") from error
            finally:
                if not execution.is_running:
                    self._executions.discard(execution)  # a cancelled one is still dying: `close` waits for it
        self._check_open()
        return result

    async def spawn(self, program: Program, *, limits: Limits, is_timed: bool) -> Process:
        link = await self._ground.link()
        async with AsyncExitStack() as stack:
            turn = await stack.enter_async_context(link.turn())
            group = await stack.enter_async_context(self._ground.group(limits))
            request = self._request(program, limits, has_group=group is not None, is_timed=is_timed)
            try:
                execution = Execution(link, limits, group, is_timed=is_timed)
                process = await SpawnedProcess.start(execution, request, turn, stack)
            except OSError as error:
                raise SandboxError(f"a program could not be run: {error}") from error
            self._spawned.add(process)
            process.end.add_done_callback(lambda _: self._spawned.discard(process))
            return process

    async def read(self, path: str) -> bytes:
        return await self._with_folder(lambda folder: folder.read(path, self._limits.file_bytes))

    async def write(self, path: str, data: bytes) -> None:
        await self._with_folder(lambda folder: folder.write(path, data))

    async def upload(self, tar: bytes, path: str) -> None:
        def unpack(folder: OpenFolder) -> None:
            folder.make_folder(path)
            for entry in entries_of(tar):
                place = str(PurePosixPath(path, entry.path))
                if entry.data is None:
                    folder.make_folder(place)
                else:
                    folder.write(place, entry.data, is_executable=entry.is_executable)

        await self._with_folder(unpack)

    async def download(self, path: str, max_bytes: int) -> bytes:
        return await self._with_folder(lambda folder: pack(folder.entries(path, max_bytes)))

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def _request(self, program: Program, limits: Limits, *, has_group: bool, is_timed: bool = True) -> bytes:
        """Return the description of a program that the launcher reads."""
        self._check_open()
        request: dict[str, Any] = {
            "argv": program.argv or None,
            "source": program.source,
            "folder": self._ground.home,
            "cwd": program.cwd,
            "env": {**self._env, **program.env},
            "cpu_s": limits.max_cpu_s if is_timed else None,
            "file_bytes": limits.file_bytes,
            "open_files": limits.open_files,
            **self._ground.limits_of_process(limits, has_group=has_group),
        }
        return json.dumps(request).encode()

    async def _run(
        self, execution: Execution, turn: ExitStack, request: bytes, stdin: bytes, output_bytes: int
    ) -> ExecResult:
        with BoundedOutput(output_bytes, lambda: execution.stop(Status.OUTPUT_LIMIT)) as output:
            stdin_file = sealed_file(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            try:
                execution.start(request, [stdin_file, *output.write_ends], turn)
            finally:
                os.close(stdin_file)
            output.close_write_ends()
            ended = await execution.wait()
            stdout, stderr = output.collect()
            return execution.result(ended, stdout, stderr, is_truncated=output.is_truncated)

    async def _with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        self._check_open()
        return await self._ground.with_folder(act)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("the sandbox is closed; acquire another")

    async def _close(self) -> None:
        dying: list[Awaitable[None]] = [execution.kill() for execution in self._executions]
        dying += [process.kill() for process in self._spawned]
        await asyncio.gather(*dying)
        await self._ground.aclose()
        self._on_closed(self)


class SpawnedProcess:
    """A program that the host talks with. Make it with `start`; it ends by itself, by `kill`, or with its cell."""

    def __init__(self, execution: Execution, stdin: asyncio.StreamWriter, stdout: "Chunks", stderr: "Chunks") -> None:
        self.stdout = stdout
        self.stderr = stderr
        self.end: asyncio.Task[ExecResult]
        self._execution = execution
        self._stdin = stdin

    @classmethod
    async def start(cls, execution: Execution, request: bytes, turn: ExitStack, resources: AsyncExitStack) -> Self:
        """Start the program; `resources`, its control group, are released when it has ended."""
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as ours:  # closed if anything fails
            with ExitStack() as theirs:
                stdin_end, write_end = _pipe(theirs, is_read=True)
                stdin, protocol = await loop.connect_write_pipe(_protocol, write_end)
                ours.callback(stdin.abort)
                stdin.set_write_buffer_limits(0)  # a write waits until the program can read all of it
                outputs: list[Chunks] = []
                ends: list[int] = []
                for _ in ("stdout", "stderr"):
                    end, read_end = _pipe(theirs, is_read=False)
                    reader = asyncio.StreamReader(limit=CHUNK_BYTES)
                    transport, _ = await loop.connect_read_pipe(partial(_protocol, reader), read_end)
                    ours.callback(transport.close)
                    ends.append(end)
                    outputs.append(Chunks(reader, transport))
                execution.start(request, [stdin_end, *ends], turn)
            process = cls(execution, asyncio.StreamWriter(stdin, protocol, None, loop), *outputs)
            process.end = asyncio.create_task(process._follow(resources.pop_all()))
            process.end.add_done_callback(lambda end: end.cancelled() or end.exception())  # nobody need ask for it
            ours.pop_all()
            return process

    async def write(self, data: bytes) -> None:
        try:
            if self._stdin.is_closing():
                raise BrokenPipeError
            self._stdin.write(data)
            await self._stdin.drain()
        except ConnectionError:
            raise BrokenPipeError("the program's stdin is closed") from None

    async def close_stdin(self) -> None:
        self._stdin.close()

    async def wait(self) -> ExecResult:
        return await asyncio.shield(self.end)

    async def kill(self) -> None:
        await self._execution.kill()
        await asyncio.wait([self.end])

    async def _follow(self, resources: AsyncExitStack) -> ExecResult:
        try:
            async with resources:
                return self._execution.result(await self._execution.wait())
        finally:
            if not self._stdin.is_closing():
                self._stdin.transport.abort()
            self.stdout.finish()
            self.stderr.finish()


class Chunks:
    """The output of a program in a pipe, for one reader. A little is read ahead; the rest stays in the pipe."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader = reader
        self._transport = transport

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if chunk := await self._reader.read(CHUNK_BYTES):
            return chunk
        raise StopAsyncIteration

    def finish(self) -> None:
        """The program is dead: read what is there and wait for no more, whoever still holds the pipe open."""
        if self._transport.is_closing():
            return
        pipe = self._transport.get_extra_info("pipe")
        for _ in range(MAX_PIPE_BYTES // CHUNK_BYTES):
            if not (data := pipe.read(CHUNK_BYTES)):  # None if there is nothing now, b"" at the end
                break
            self._reader.feed_data(data)
        self._reader.feed_eof()
        self._transport.close()


def _pipe(theirs: ExitStack, *, is_read: bool) -> tuple[int, FileIO]:
    """Return the program's end of a new pipe, which `theirs` closes, and the host's."""
    read_end, write_end = os.pipe()
    end, host_end = (read_end, write_end) if is_read else (write_end, read_end)
    theirs.callback(os.close, end)
    return end, FileIO(host_end, "w" if is_read else "r")


def _protocol(reader: asyncio.StreamReader | None = None) -> asyncio.StreamReaderProtocol:
    return asyncio.StreamReaderProtocol(reader or asyncio.StreamReader())
