"""A program in a container whose output is read as it comes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self

from sandboxes.containers.agent.wire import Tell
from sandboxes.containers.agent_link import AgentLink, AgentRun
from sandboxes.containers.judgement import result_of
from sandboxes.limits import Limits
from sandboxes.result import ExecResult

MAX_WAITING_BYTES = 4 * 2**20
"""An agent sends a chunk when the last was taken, and at a program's end what its pipes hold. More is no agent's."""


class Chunks:
    """What came of one stream and nobody has read. `on_taken` asks for the next."""

    def __init__(self, on_taken: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._on_taken = on_taken
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, data: bytes) -> None:
        """An empty one is the end."""
        self.num_bytes += len(data)
        self._queue.put_nowait(data)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await self._queue.get()
        if not data:
            self._queue.put_nowait(data)  # for whoever asks again
            raise StopAsyncIteration
        self.num_bytes -= len(data)
        self._on_taken()
        return data


class ContainerProcess:
    """Make it with `start`."""

    def __init__(self, link: AgentLink, limits: Limits) -> None:
        self._link = link
        self._limits = limits
        self._run: AgentRun | None = None
        self._writing = asyncio.Lock()
        self._chunks = {stream: self._new_chunks(stream) for stream in (Tell.STDOUT, Tell.STDERR)}

    @classmethod
    async def start(cls, link: AgentLink, request: bytes, limits: Limits, *, is_timed: bool) -> Self:
        process = cls(link, limits)
        process._run = run = await link.start(
            request,
            wall_s=limits.wall_s if is_timed else 0,
            output_bytes=-1,
            is_paced=True,
            on_output=process._on_output,
        )
        run.ended.add_done_callback(process._on_end)
        return process

    @property
    def run(self) -> AgentRun:
        assert self._run is not None
        return self._run

    @property
    def stdout(self) -> AsyncIterator[bytes]:
        return self._chunks[Tell.STDOUT]

    @property
    def stderr(self) -> AsyncIterator[bytes]:
        return self._chunks[Tell.STDERR]

    async def write(self, data: bytes) -> None:
        async with self._writing:
            if data and not await self._link.offer(self.run, data):
                raise BrokenPipeError("the program reads its stdin no more")

    async def close_stdin(self) -> None:
        self._link.close_stdin(self.run)

    async def wait(self) -> ExecResult:
        end = await asyncio.shield(self.run.ended)
        return result_of(end, b"", b"", self._limits)

    async def kill(self) -> None:
        self._link.kill(self.run)
        await asyncio.shield(self.run.ended)

    def _new_chunks(self, stream: Tell) -> Chunks:
        return Chunks(lambda: self._link.let_more(self.run, stream))

    def _on_output(self, stream: Tell, data: bytes) -> None:
        chunks = self._chunks[stream]
        chunks.put(data)
        if chunks.num_bytes > MAX_WAITING_BYTES:
            self._link.fail("it sends output that nobody asked for")

    def _on_end(self, _ended: object) -> None:
        for chunks in self._chunks.values():
            chunks.put(b"")
