"""A cell whose programs a launcher runs: the same for every backend that has one.

What differs from one to the next is the `Ground` that the programs stand on. It knows no backend.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import PurePosixPath
from typing import Any, Protocol, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.archive import entries_of, pack
from sandboxes.base import Process, Program
from sandboxes.environment import base_environment
from sandboxes.execution import Execution, Group, sealed_file
from sandboxes.folder import OpenFolder
from sandboxes.limits import Limits
from sandboxes.link import LauncherLink, Turn
from sandboxes.output import BoundedOutput
from sandboxes.result import ExecResult, Status
from sandboxes.spawned import SpawnedProcess

Answer = TypeVar("Answer")


class Ground(Protocol):
    """Where the programs of one cell run, and what bounds them."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def home(self) -> str:
        """The working directory, as programs see it."""
        ...

    @property
    def env(self) -> Mapping[str, str]:
        """What programs find beside PATH, HOME and TMPDIR."""
        ...

    async def link(self) -> LauncherLink:
        """The launcher to use now; SandboxError when there is none any more."""
        ...

    def group(self, limits: Limits) -> AbstractAsyncContextManager[Group | None]:
        """What bounds all processes of one program together, where that can be had."""
        ...

    def limits_of_process(self, limits: Limits, *, has_group: bool) -> dict[str, int | None]:
        """What the launcher asks of the kernel. SandboxError or ValueError for what this ground cannot enforce."""
        ...

    async def with_folder(self, act: Callable[[OpenFolder], Answer]) -> Answer:
        """Do something with the files, in a thread."""
        ...

    async def aclose(self) -> None:
        """Give it up, with all that is in it; no program runs any more."""
        ...


class LaunchedCell:
    """Programs on a ground. `on_closed` is called once, when all is gone."""

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
            except OSError as error:  # of this process, which may have too many files open; the program did nothing
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
                process = SpawnedProcess(Execution(link, limits, group, is_timed=is_timed))
                end = process.start(request, turn, stack)
            except OSError as error:
                raise SandboxError(f"a program could not be run: {error}") from error
            self._spawned.add(process)
            end.add_done_callback(lambda _: self._spawned.discard(process))
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
        """What to run, as the launcher reads it."""
        self._check_open()
        bounds = self._ground.limits_of_process(limits, has_group=has_group)
        if not is_timed:
            bounds["cpu_s"] = None
        request: dict[str, Any] = {
            "argv": program.argv or None,
            "source": program.source,
            "folder": self._ground.home,
            "cwd": program.cwd,
            "env": {**self._env, **program.env},
            **bounds,
        }
        return json.dumps(request).encode()

    async def _run(
        self, execution: Execution, turn: Turn, request: bytes, stdin: bytes, output_bytes: int
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
