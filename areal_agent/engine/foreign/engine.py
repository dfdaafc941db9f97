"""The client of one SGLang or vLLM server, as `protocols.Engine`.

A `ServerRequest` is always streamed, because closing its stream removes it from the server at once in any state:

    not begun, or held at a pause   close the stream: an abort would be lost (SGLang: and the next one for it, too)
    begun (an event has arrived)    abort and read on, so that all tokens sampled until then are reported
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from areal_agent.engine.foreign.server import ForeignServer, ServedModel, ServerState, ServerWeights
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.transport import wait_until_healthy
from areal_agent.engine.wire.control import EngineStats
from areal_agent.engine.wire.generate import check_request
from areal_agent.errors import EngineError, EngineRejected, WeightUpdateError
from areal_agent.process import count_cancellations
from areal_agent.types import (
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    TokenChunk,
    Weights,
    WeightVersion,
)

NOTHING = GenerateResult(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORT)
"""The result of a request that ended before it gave anything."""


class ServerRequest:
    """One call of `generate`. Its ids at the server have equal lengths, because SGLang aborts ids by prefix."""

    def __init__(self, server: ForeignServer, request: GenerateRequest) -> None:
        self.rid = uuid.uuid4().hex
        self._server = server
        self._request = request
        self._reader = server.reader(request)
        self._reading: asyncio.Task[GenerateResult] | None = None
        self._has_begun = False
        self._is_given_up = False

    async def run(
        self, on_chunk: Callable[[TokenChunk], None] | None, admitted: Callable[[], Awaitable[str]]
    ) -> GenerateResult:
        """Wait for `admitted`, which returns the serving weights' label, then sample. Cancelling closes the stream."""
        if self._is_given_up:
            return NOTHING
        num_cancelled = count_cancellations()
        self._reading = asyncio.create_task(self._read(on_chunk, admitted), name=f"reader of {self.rid}")
        try:
            return await self._reading
        except asyncio.CancelledError:
            if self._is_given_up and self._reading.cancelled() and count_cancellations() == num_cancelled:
                return NOTHING
            raise
        finally:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def abort(self) -> None:
        """End the request: `run` returns what it has."""
        if self._has_begun:
            await self._server.abort(self.rid)
            return
        self._is_given_up = True
        if self._reading is not None:
            self._reading.cancel()

    async def _read(
        self, on_chunk: Callable[[TokenChunk], None] | None, admitted: Callable[[], Awaitable[str]]
    ) -> GenerateResult:
        body = self._server.encode(self._request, self.rid, await admitted())

        def take(chunk: TokenChunk) -> None:
            self._has_begun = True
            if chunk.token_ids and on_chunk is not None:
                on_chunk(chunk)

        return await self._server.transport.answer(self._server.generate_path, body, self._reader, take)


class RequestsInFlight:
    """A client's requests from call to end. A request has *begun* once it was allowed to go to the server."""

    def __init__(self) -> None:
        self.by_id: dict[str, ServerRequest] = {}  # by this client's ids
        self.may_begin = asyncio.Event()
        self.may_begin.set()
        self._begun: set[ServerRequest] = set()
        self._has_ended = asyncio.Event()

    @contextmanager
    def holding(self, request_id: str, request: ServerRequest) -> Generator[None]:
        """Hold a request within the block. Raises EngineRejected when its id is taken."""
        if request_id in self.by_id:
            raise EngineRejected(f"a request {request_id!r} is in flight; give every request an id of its own")
        self.by_id[request_id] = request
        try:
            yield
        finally:
            del self.by_id[request_id]
            self._begun.discard(request)
            self._has_ended.set()

    async def begin(self, request: ServerRequest) -> None:
        """Wait until the request may go to the server; from then on it has begun."""
        while not self.may_begin.is_set():  # another pause may follow at once
            await self.may_begin.wait()
        self._begun.add(request)

    async def end_of_begun(self) -> None:
        """Wait until all requests that have begun by now have ended."""
        begun = set(self._begun)
        while not begun.isdisjoint(self._begun):
            self._has_ended.clear()
            await self._has_ended.wait()


HEALTH_TIMEOUT_S = 5.0


class ForeignEngine:
    """One server. Use it from one event loop, and `aclose` it. Servers with the same weights share `folders`."""

    def __init__(
        self, server: ForeignServer, *, folders: WeightFolders | None = None, max_context_tokens: int | None = None
    ) -> None:
        self.base_url = server.transport.base_url
        self._server = server
        self._folders = folders or WeightFolders()
        self._max_context_tokens = max_context_tokens
        self.requests = RequestsInFlight()
        self._info: EngineInfo | None = None
        self._model: ServedModel | None = None
        self._weights: ServerWeights | None = None
        self._paused: PauseMode | None = None

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample one completion, without a time limit. Cancelling the call ends it at the server, too."""
        sent = ServerRequest(self._server, request)
        with self.requests.holding(request.request_id, sent):
            check_request(request, self._info or await self.info())
            if request.images and not (self._model and self._model.takes_images):
                raise EngineRejected(f"{self.base_url} serves a model that takes no images; leave them out")
            return await sent.run(on_chunk, lambda: self._admitted(sent))

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns what it has."""
        sent = self.requests.by_id.get(request_id)
        if sent is not None:
            await sent.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` lets requests in flight finish; new ones wait here."""
        if mode is PauseMode.WAIT:
            self.requests.may_begin.clear()
            await self.requests.end_of_begun()
        await self._server.pause(mode)
        self._paused = mode

    async def resume(self) -> None:
        """Continue sampling."""
        self.requests.may_begin.set()
        await self._server.resume()
        self._paused = None

    async def begin_push(self, push_id: str) -> None:
        """Open a push and forget one that is open, since no other client pushes to this server."""
        await (await self._known_weights()).begin(push_id)

    async def send_push(self, push_id: str, weights: Weights) -> None:
        """Put the weights where the server can load them and verify them; the old version keeps serving."""
        await (await self._known_weights()).send(push_id, weights)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        """Make the paused server load what was sent. A pause `in_place` keeps the KV cache."""
        if self._paused is None:
            raise WeightUpdateError(
                f"{self.base_url} is not paused, so running requests would get new weights; pause it first"
            )
        flush_cache = self._paused is not PauseMode.IN_PLACE  # SGLang answers a flush in place with 400, after the swap
        await (await self._known_weights()).commit(push_id, version, flush_cache=flush_cache)

    async def abort_push(self, push_id: str) -> None:
        """Forget a push. A push that is not open is no error."""
        if self._weights is not None:
            await self._weights.abort(push_id)

    # -------------------------------------------------------------------------------------- what it serves

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a folder of a model or of adapters as `version`, whatever was served before."""
        weights = await self._known_weights()
        try:
            await self.pause(PauseMode.RETRACT)  # inside, because a pause that fails may still have paused the server
            await weights.load(model, version)
        finally:
            await self.resume()

    async def info(self) -> EngineInfo:
        """Return the model that the server serves, and the current weight version."""
        epoch = self._weights.epoch if self._weights is not None else 0
        state = await self._server.state()
        model = await self._model_in(state.model)
        if self._weights is None:
            self._weights = self._weights_of(state, model)
        else:
            await self._weights.found(state.served, epoch)
        limit = self._max_context_tokens or state.max_context_tokens
        self._info = EngineInfo(
            model_path=str(state.model),
            weight_version=state.served.version or WeightVersion(),
            vocab_size=model.vocab_size,
            max_context_tokens=min(limit, state.max_context_tokens),
            has_grammar=state.has_grammar,
        )
        return self._info

    async def stats(self) -> EngineStats:
        """Return the server's load, as far as it reports it."""
        return await self._server.stats((await self._known_weights()).serving.version or WeightVersion())

    async def health(self) -> bool:
        """Return whether the scheduler answers, paused or not, and the weights are known."""
        try:
            await self._server.probe(HEALTH_TIMEOUT_S)
            if self._weights is not None:
                self._weights.require_known()
        except EngineError:
            return False
        return True

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        await wait_until_healthy(f"the {self._server.kind} server at {self.base_url}", self.health, timeout_s)

    async def aclose(self) -> None:
        """Close the connections. Calling it again does nothing."""
        weights, self._weights = self._weights, None
        if weights is not None:
            await weights.aclose()
        await self._server.transport.aclose()

    # ------------------------------------------------------------------------------------------- internals

    async def _admitted(self, request: ServerRequest) -> str:
        """Wait until a request may go to the server; return the label of its weights. Raises EngineUnreachable."""
        weights = await self._known_weights()
        await self.requests.begin(request)
        weights.require_known()
        return weights.serving.label

    async def _model_in(self, folder: Path) -> ServedModel:
        if self._model is None or self._model.folder != folder:
            self._model = await asyncio.to_thread(ServedModel.read, folder)
        return self._model

    def _weights_of(self, state: ServerState, model: ServedModel) -> ServerWeights:
        known = replace(model, has_adapters=state.applies_adapters)
        return ServerWeights(self._server, self._folders, known, state.served)

    async def _known_weights(self) -> ServerWeights:
        if self._weights is None:
            await self.info()
        assert self._weights is not None  # set by info
        return self._weights
