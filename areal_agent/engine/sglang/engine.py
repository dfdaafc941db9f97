"""The client of one SGLang server, as `protocols.Engine`. It knows no socket (transport.py) and no process.

What SGLang does otherwise than the common wire says, and what is done about it:

    an id outside the vocabulary ends the server         checked here, against the model's config.json
    an abort takes ids by prefix, is lost at a pause     foreign/request.py: ids of equal length, streams to close
    `/health` samples a token: dead while paused         `/server_info` goes through the scheduler and needs no model
    a label does not move without being given            loader.py: every update gives one, and it is read back
    400 although the weights have changed                foreign/weights.py: paused first; whatever fails is undone
    idle connections are closed after 5 s                every call has its own: none fails because of that
    what a folder lacks keeps its old value              foreign/tensors.py: proved whole before it is told of
    no pause lets requests end first (`wait`)            requests wait here, until those that have begun have ended
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from areal_agent.engine import wire
from areal_agent.engine.fields import WireError
from areal_agent.engine.foreign.request import ServerRequest
from areal_agent.engine.foreign.served_model import ServedModel
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.foreign.weights import ServerWeights
from areal_agent.engine.limits import check_request
from areal_agent.engine.readiness import wait_until_healthy
from areal_agent.engine.sglang.dialect import SglangDialect
from areal_agent.engine.sglang.info import LOADS, decode_loads, decode_served, decode_start
from areal_agent.engine.sglang.loader import SglangLoader
from areal_agent.engine.transport import CONTROL_TIMEOUT_S, Transport
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import EngineInfo, GenerateRequest, GenerateResult, PauseMode, TokenChunk, Weights
from areal_agent.errors import EngineError, EngineRejected, WeightUpdateError
from areal_agent.types import WeightVersion

HEALTH_TIMEOUT_S = 5.0

T = TypeVar("T")


class SglangEngine:
    """One server. Use it from one event loop, and `aclose` it. Servers that get the same weights share `folders`."""

    def __init__(
        self, base_url: str, *, folders: WeightFolders | None = None, max_context_tokens: int | None = None
    ) -> None:
        self._transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self._folders = folders or WeightFolders()
        self._max_context_tokens = max_context_tokens
        self._info: EngineInfo | None = None
        self._model: ServedModel | None = None
        self._weights: ServerWeights | None = None
        self._paused: PauseMode | None = None
        self._requests: dict[str, ServerRequest] = {}  # in flight, by our ids
        self._has_ended = asyncio.Condition()
        self._admits = asyncio.Event()
        self._admits.set()

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return self._transport.base_url

    @property
    def num_requests(self) -> int:
        """How many requests of this client are in flight."""
        return len(self._requests)

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample one completion; it may take as long as it takes. Cancelling the call ends it in the server, too.

        The seed of a request holds where the server was started with `--enable-deterministic-inference`.
        """
        if request.request_id in self._requests:
            raise EngineRejected(f"a request {request.request_id!r} is in flight; give every request an id of its own")
        sent = self._requests[request.request_id] = ServerRequest(self._transport, SglangDialect(), request)
        try:
            check_request(request, self._info or await self.info())
            return await sent.run(on_chunk, self._admitted)
        finally:
            del self._requests[request.request_id]
            async with self._has_ended:
                self._has_ended.notify_all()

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns what it has."""
        sent = self._requests.get(request_id)
        if sent is not None:
            await sent.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` takes as long as the requests of this client that are in flight."""
        if mode is PauseMode.WAIT:
            await self._let_requests_end()
            mode = PauseMode.RETRACT
        timeout_s = None if mode is PauseMode.ABORT else CONTROL_TIMEOUT_S
        await self._transport.post(wire.PAUSE_GENERATION, wire.encode_pause(mode), timeout_s=timeout_s)
        self._paused = mode

    async def resume(self) -> None:
        """Go on sampling."""
        self._admits.set()
        await self._transport.post(wire.CONTINUE_GENERATION, {})
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
        flush_cache = self._paused is not PauseMode.IN_PLACE  # a flush in place is answered with 400, after the swap
        await (await self._known_weights()).commit(push_id, version, flush_cache=flush_cache)

    async def abort_push(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._weights is not None:
            await self._weights.abort(push_id)

    # -------------------------------------------------------------------------------------- what it serves

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a Hugging Face folder as `version`, whatever was served before: the first call to a server."""
        weights = await self._known_weights()
        await self.pause(PauseMode.RETRACT)
        try:
            await weights.load(model, version)
        finally:
            await self.resume()

    async def info(self) -> EngineInfo:
        """The model that it serves, and the current weight version."""
        epoch = self._weights.epoch if self._weights is not None else 0
        started = self._decode(decode_start, wire.SERVER_INFO, await self._transport.get(wire.SERVER_INFO))
        served = self._decode(decode_served, wire.MODEL_INFO, await self._transport.get(wire.MODEL_INFO))
        model = await self._model_in(Path(started.model_path))
        if self._weights is None:
            self._weights = ServerWeights(SglangLoader(self._transport), self._folders, model, served)
        else:
            await self._weights.found(served, epoch)
        limit = self._max_context_tokens or started.max_context_tokens
        self._info = replace(
            started,
            vocab_size=model.vocab_size,
            max_context_tokens=min(limit, started.max_context_tokens),
            weight_version=served.version or WeightVersion(),
        )
        return self._info

    async def stats(self) -> EngineStats:
        """How many requests it runs now."""
        version = (await self._known_weights()).serving.version or WeightVersion()
        body = await self._transport.get(LOADS)
        return self._decode(lambda fields: decode_loads(fields, version), LOADS, body)

    async def health(self) -> bool:
        """Whether its scheduler answers, paused or not, and its weights are known."""
        try:
            await self._transport.get(wire.SERVER_INFO, timeout_s=HEALTH_TIMEOUT_S)
            if self._weights is not None:
                self._weights.require_known()
        except EngineError:
            return False
        return True

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        await wait_until_healthy(f"the SGLang server at {self.base_url}", self.health, timeout_s)

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        weights, self._weights = self._weights, None
        if weights is not None:
            await weights.aclose()
        await self._transport.aclose()

    # ------------------------------------------------------------------------------------------- internals

    async def _let_requests_end(self) -> None:
        """From now on requests wait here; return when those that have begun have ended."""
        begun = set(self._requests.values())
        self._admits.clear()
        async with self._has_ended:
            await self._has_ended.wait_for(lambda: begun.isdisjoint(self._requests.values()))

    async def _admitted(self) -> None:
        """Return when a request may go to the server. Raises EngineUnreachable when none may."""
        await self._admits.wait()
        (await self._known_weights()).require_known()

    async def _model_in(self, folder: Path) -> ServedModel:
        if self._model is None or self._model.folder != folder:
            self._model = await asyncio.to_thread(ServedModel.read, folder)
        return self._model

    async def _known_weights(self) -> ServerWeights:
        if self._weights is None:
            await self.info()
        assert self._weights is not None  # info has made it
        return self._weights

    def _decode(self, decode: Callable[[object], T], path: str, body: object) -> T:
        try:
            return decode(body)
        except WireError as error:
            raise self._transport.unreadable(path, error) from error
