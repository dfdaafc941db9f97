"""One request at a server, from its first byte to its last. Knows nothing of other requests, nor of weights.

It is always streamed. Who closes a stream takes the request out of the server at once, wherever it stands there:

    not begun, or held at a pause   close: an abort would be lost (SGLang: and the next one for it, too)
    begun (a token has come)        abort, and read on: what was sampled is told to the end

How a server is asked, and how it answers, is its `Dialect`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from areal_agent.engine import wire
from areal_agent.engine.transport import Transport
from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.types import FinishReason, JsonObject

NOTHING = GenerateResult(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORT)
"""What a request gave that was ended before it gave anything."""

_UNTOLD_STATUS = 400  # of a failure in mid-stream that names none


class AnswerReader(Protocol):
    """Puts the events of one answer together."""

    @property
    def result(self) -> GenerateResult | None:
        """All of it, once the events that make it have been read."""
        ...

    def read(self, fields: JsonObject) -> TokenChunk:
        """Read one event; the tokens that are new, perhaps none.

        Raises WireError for what cannot be read, and an EngineError when the server says that it failed.
        """
        ...


class Dialect(Protocol):
    """How one kind of server is asked for a completion."""

    @property
    def path(self) -> str:
        """Where requests are posted."""
        ...

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        """The body of a request, to be answered in events. The server knows it by `rid`; `label` is what serves now."""
        ...

    def reader(self, request: GenerateRequest) -> AnswerReader:
        """For the events of its answer."""
        ...

    async def abort(self, transport: Transport, rid: str) -> None:
        """Let the server end a request that has begun."""
        ...


class ServerRequest:
    """One call of `generate`. Its id at the server is its own, as long as any other: SGLang takes ids for prefixes."""

    def __init__(self, transport: Transport, dialect: Dialect, request: GenerateRequest) -> None:
        self.rid = uuid.uuid4().hex
        self._transport = transport
        self._dialect = dialect
        self._request = request
        self._reader = dialect.reader(request)
        self._reading: asyncio.Task[GenerateResult] | None = None
        self._has_begun = False
        self._is_given_up = False

    async def run(
        self, on_chunk: Callable[[TokenChunk], None] | None, admitted: Callable[[], Awaitable[str]]
    ) -> GenerateResult:
        """Sample to the end, once `admitted`, which tells the label of what serves. Cancelling it closes the stream."""
        if self._is_given_up:
            return NOTHING
        num_cancelled = _num_cancelled()
        self._reading = asyncio.create_task(self._read(on_chunk, admitted), name=f"reader of {self.rid}")
        try:
            return await self._reading
        except asyncio.CancelledError:
            if self._is_given_up and self._reading.cancelled() and _num_cancelled() == num_cancelled:
                return NOTHING
            raise
        finally:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def abort(self) -> None:
        """End it: `run` returns what it has."""
        if self._has_begun:
            await self._dialect.abort(self._transport, self.rid)
            return
        self._is_given_up = True
        if self._reading is not None:
            self._reading.cancel()

    async def _read(
        self, on_chunk: Callable[[TokenChunk], None] | None, admitted: Callable[[], Awaitable[str]]
    ) -> GenerateResult:
        label = await admitted()
        splitter = wire.EventSplitter()
        body = self._dialect.encode(self._request, self.rid, label)
        async with contextlib.aclosing(self._transport.stream(self._dialect.path, body)) as pieces:
            async for piece in pieces:
                for event in splitter.feed(piece):
                    self._has_begun = True
                    chunk = self._read_event(event)
                    if chunk.token_ids and on_chunk is not None:
                        on_chunk(chunk)
        if self._reader.result is None:
            raise EngineUnreachable(
                f"the answer of {self._transport.base_url}{self._dialect.path} ended before its last event; is the "
                "engine running? see its log"
            )
        return self._reader.result

    def _read_event(self, event: bytes) -> TokenChunk:
        read, path = self._transport.decoded, self._dialect.path
        body = read(wire.decode_event, path, event)
        if "error" not in body:
            return read(self._reader.read, path, body)
        failure = wire.decode_failure(body, _UNTOLD_STATUS)
        message = f"{self._transport.base_url}{path} broke off with {failure.status}: {failure.message}"
        raise EngineRejected(message) if failure.is_refusal else EngineUnreachable(message)


def _num_cancelled() -> int:
    """How often the task that runs here was cancelled; it may live on after that."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()
