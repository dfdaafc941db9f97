"""A program of a launcher that the host talks with while it runs. It knows no backend."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack

from sandboxes.execution import Execution
from sandboxes.link import Turn
from sandboxes.result import ExecResult
from sandboxes.streams import PipeReader, PipeWriter


class SpawnedProcess:
    """Make it with `start`; it ends by itself, by `kill`, or with its cell."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        with ExitStack() as ends:  # where no descriptor is left for one, none of those before may stay
            self._stdin = PipeWriter()
            ends.callback(self._stdin.close_read_end)
            self._stdout = PipeReader()
            ends.callback(self._stdout.close_write_end)
            self._stderr = PipeReader()
            ends.pop_all()
        self._end: asyncio.Task[ExecResult] | None = None

    def start(self, request: bytes, turn: Turn, resources: AsyncExitStack) -> asyncio.Task[ExecResult]:
        """The task that ends with the program; it then releases `resources`, its control group."""
        try:
            streams = [self._stdin.read_end, self._stdout.write_end, self._stderr.write_end]
            self._execution.start(request, streams, turn)
        finally:
            self._stdin.close_read_end()
            self._stdout.close_write_end()
            self._stderr.close_write_end()
        self._end = asyncio.create_task(self._follow(resources.pop_all()))
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())  # nobody need ask for its result
        return self._end

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        return self._stdout

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        return self._stderr

    async def write(self, data: bytes) -> None:
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        self._stdin.close()

    async def wait(self) -> ExecResult:
        assert self._end is not None
        return await asyncio.shield(self._end)

    async def kill(self) -> None:
        assert self._end is not None
        await self._execution.kill()
        await asyncio.wait([self._end])

    async def _follow(self, resources: AsyncExitStack) -> ExecResult:
        try:
            async with resources:
                return self._execution.result(await self._execution.wait())
        finally:
            self._stdin.close()
            self._stdout.finish()
            self._stderr.finish()
