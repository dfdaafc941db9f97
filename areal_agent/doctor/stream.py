"""One request that runs until it is told to end, watched as its tokens come. It knows no check."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk
from areal_agent.protocols import Sampler


class Stream:
    """A request in flight. Made by `open_stream`."""

    def __init__(self, engine: Sampler, request: GenerateRequest) -> None:
        self.num_tokens = 0
        self._engine = engine
        self._request_id = request.request_id
        self._has_changed = asyncio.Event()
        self._answer = asyncio.ensure_future(engine.generate(request, self._take))
        self._answer.add_done_callback(lambda _: self._has_changed.set())

    @property
    def has_ended(self) -> bool:
        return self._answer.done()

    async def grows(self, *, beyond: int = 0) -> bool:
        """Wait for more than so many tokens; False when the answer has ended with fewer. Raises what `generate` did."""
        while self.num_tokens <= beyond and not self._answer.done():
            self._has_changed.clear()
            await self._has_changed.wait()
        if self._answer.done():
            self._answer.result()
        return self.num_tokens > beyond

    async def end(self) -> GenerateResult:
        """Abort it; what it has."""
        if not self._answer.done():
            await self._engine.abort(self._request_id)
        return await self._answer

    def _take(self, chunk: TokenChunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self._has_changed.set()

    async def aclose(self) -> None:
        """Cancel it, if it still runs."""
        self._answer.cancel()
        await asyncio.wait({self._answer})


@asynccontextmanager
async def open_stream(engine: Sampler, request: GenerateRequest) -> AsyncGenerator[Stream]:
    """Send a request; it is gone on leaving."""
    stream = Stream(engine, request)
    try:
        yield stream
    finally:
        await stream.aclose()
