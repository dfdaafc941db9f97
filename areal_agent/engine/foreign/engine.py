"""The client of one server that is not ours, as `protocols.Engine`. It knows it by its `ForeignServer` alone."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from areal_agent.engine.foreign.in_flight import RequestsInFlight
from areal_agent.engine.foreign.request import ServerRequest
from areal_agent.engine.foreign.served_model import ServedModel
from areal_agent.engine.foreign.server import ForeignServer, ServerState
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.foreign.weights import ServerWeights
from areal_agent.engine.limits import check_request
from areal_agent.engine.readiness import wait_until_healthy
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import EngineInfo, GenerateRequest, GenerateResult, PauseMode, TokenChunk, Weights
from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.types import WeightVersion

HEALTH_TIMEOUT_S = 5.0


class ForeignEngine:
    """One server. Use it from one event loop, and `aclose` it. Servers that get the same weights share `folders`."""

    def __init__(
        self, server: ForeignServer, *, folders: WeightFolders | None = None, max_context_tokens: int | None = None
    ) -> None:
        self._server = server
        self._folders = folders or WeightFolders()
        self._max_context_tokens = max_context_tokens
        self._requests = RequestsInFlight()
        self._info: EngineInfo | None = None
        self._model: ServedModel | None = None
        self._weights: ServerWeights | None = None
        self._paused: PauseMode | None = None

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return self._server.transport.base_url

    @property
    def num_requests(self) -> int:
        """How many requests of this client are in flight."""
        return len(self._requests)

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample one completion; it may take as long as it takes. Cancelling the call ends it in the server, too."""
        sent = ServerRequest(self._server.transport, self._server.dialect, request)
        with self._requests.holding(request.request_id, sent):
            check_request(request, self._info or await self.info())
            return await sent.run(on_chunk, lambda: self._admitted(sent))

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns what it has."""
        sent = self._requests.get(request_id)
        if sent is not None:
            await sent.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` takes as long as the requests that are in flight; those that come then wait here."""
        if mode is PauseMode.WAIT:
            self._requests.hold_back()
            await self._requests.end_of_begun()
        await self._server.pause(mode)
        self._paused = mode

    async def resume(self) -> None:
        """Go on sampling."""
        self._requests.let_go()
        await self._server.resume()
        self._paused = None

    async def begin_push(self, push_id: str) -> None:
        """Open a push of weights; one that is open is forgotten: no other client pushes to this server."""
        await (await self._known_weights()).begin(push_id)

    async def send_push(self, push_id: str, weights: Weights) -> None:
        """Have the weights where the server can load them, proved; the old version serves."""
        await (await self._known_weights()).send(push_id, weights)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        """Let the server load what was sent; it has to be paused. The KV cache of a pause `in_place` stays."""
        if self._paused is None:
            raise WeightUpdateError(f"{self.base_url} is not paused: it would load weights under running requests")
        flush_cache = self._paused is not PauseMode.IN_PLACE  # SGLang answers a flush in place with 400, after the swap
        await (await self._known_weights()).commit(push_id, version, flush_cache=flush_cache)

    async def abort_push(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._weights is not None:
            await self._weights.abort(push_id)

    # -------------------------------------------------------------------------------------- what it serves

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a folder of a model or of adapters as `version`, whatever was served before: the first call to one."""
        weights = await self._known_weights()
        try:
            await self.pause(PauseMode.RETRACT)  # one that fails may have paused it all the same
            await weights.load(model, version)
        finally:
            await self.resume()

    async def info(self) -> EngineInfo:
        """The model that it serves, and the current weight version."""
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
        """Its work, as far as it tells."""
        return await self._server.stats((await self._known_weights()).serving.version or WeightVersion())

    async def health(self) -> bool:
        """Whether its scheduler answers, paused or not, and its weights are known."""
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
        """Close the connections. Harmless when done before."""
        weights, self._weights = self._weights, None
        if weights is not None:
            await weights.aclose()
        await self._server.transport.aclose()

    # ------------------------------------------------------------------------------------------- internals

    async def _admitted(self, request: ServerRequest) -> str:
        """The label of what serves, once a request may go to the server. Raises EngineUnreachable when none may."""
        weights = await self._known_weights()
        await self._requests.begin(request)
        weights.require_known()
        return weights.serving.label

    async def _model_in(self, folder: Path) -> ServedModel:
        if self._model is None or self._model.folder != folder:
            self._model = await asyncio.to_thread(ServedModel.read, folder)
        return self._model

    def _weights_of(self, state: ServerState, model: ServedModel) -> ServerWeights:
        known = replace(model, has_adapters=state.applies_adapters)
        server = self._server
        return ServerWeights(server.loader, server.receiver, self._folders, known, state.served)

    async def _known_weights(self) -> ServerWeights:
        if self._weights is None:
            await self.info()
        assert self._weights is not None  # info has made it
        return self._weights
