"""The client of one vLLM server, as `protocols.Engine`. It knows no socket (transport.py) and no process.

The server is started by launcher.py. What vLLM does otherwise than this project, and what is done about it:

    log-probabilities are before temperature             launcher.py: those that were sampled from are asked for
    a reload leaves a tied head as it was, on a CPU      worker_extension.py: the head is packed again
    loaded adapters are those of later requests          worker_extension.py: they take the place of those before
    a load does not move the label                       loader.py: it is given afterwards, and read back
    flushing may be refused, with a success              loader.py: the answer is read; requests are taken back first
    keys and values are found again by tokens alone      dialect.py: salted with the label of the weights
    the folder that serves is not told after a load      foreign/weights.py: known here, or nothing can be put back
    `/health` answers while the scheduler hangs          `/is_paused` goes through the scheduler
    an answer ends at the end token of the model         sampling.py: at the tokens of the request alone
    likeliest tokens have the sampled one in front       answer.py: one more is asked for, and they are ranked
    idle connections are closed after 5 s                every call has its own: none fails because of that
    an id outside the vocabulary, a prompt too long      checked here, with this project's words

Seeds hold. On a CPU it wants a head dimension of 32 or more.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from areal_agent.engine.fields import WireError
from areal_agent.engine.foreign.request import ServerRequest
from areal_agent.engine.foreign.served_model import ServedModel
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.foreign.weights import Served, ServerWeights
from areal_agent.engine.limits import check_request
from areal_agent.engine.readiness import wait_until_healthy
from areal_agent.engine.transport import CONTROL_TIMEOUT_S, Transport
from areal_agent.engine.vllm.dialect import VllmDialect
from areal_agent.engine.vllm.info import (
    IS_PAUSED,
    METRICS,
    MODELS,
    UNLABELLED,
    WEIGHT_INFO,
    decode_label,
    decode_metrics,
    decode_started,
)
from areal_agent.engine.vllm.loader import VllmLoader
from areal_agent.engine.vllm.receiver import VllmReceiver
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import EngineInfo, GenerateRequest, GenerateResult, PauseMode, TokenChunk, Weights
from areal_agent.errors import EngineError, EngineRejected, WeightUpdateError
from areal_agent.types import WeightVersion

HEALTH_TIMEOUT_S = 5.0

_MODES = {PauseMode.ABORT: "abort", PauseMode.RETRACT: "keep", PauseMode.IN_PLACE: "keep", PauseMode.WAIT: "wait"}

T = TypeVar("T")
Body = TypeVar("Body")


class VllmEngine:
    """One server. Use it from one event loop, and `aclose` it. Servers that get the same weights share `folders`."""

    def __init__(
        self, base_url: str, *, folders: WeightFolders | None = None, max_context_tokens: int | None = None
    ) -> None:
        self._transport = Transport(base_url, keeps_connections=False)  # uvicorn closes them after 5 s
        self._dialect = VllmDialect(self._label)
        self._folders = folders or WeightFolders()
        self._max_context_tokens = max_context_tokens
        self._info: EngineInfo | None = None
        self._model: ServedModel | None = None
        self._weights: ServerWeights | None = None
        self._paused: PauseMode | None = None
        self._requests: dict[str, ServerRequest] = {}  # in flight, by our ids
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
        """Sample one completion; it may take as long as it takes. Cancelling the call ends it in the server, too."""
        if request.request_id in self._requests:
            raise EngineRejected(f"a request {request.request_id!r} is in flight; give every request an id of its own")
        sent = self._requests[request.request_id] = ServerRequest(self._transport, self._dialect, request)
        try:
            check_request(request, self._info or await self.info())
            return await sent.run(on_chunk, self._admitted)
        finally:
            del self._requests[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns what it has."""
        sent = self._requests.get(request_id)
        if sent is not None:
            await sent.abort()

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. `wait` takes as long as the requests of all clients that are in flight."""
        if mode is PauseMode.WAIT:
            self._admits.clear()
        timeout_s = None if mode is PauseMode.WAIT else CONTROL_TIMEOUT_S
        path = f"/pause?mode={_MODES[mode]}&clear_cache=false"
        await self._transport.post(path, {}, timeout_s=timeout_s)
        self._paused = mode

    async def resume(self) -> None:
        """Go on sampling."""
        self._admits.set()
        await self._transport.post("/resume", {})
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
        flush_cache = self._paused is not PauseMode.IN_PLACE
        await (await self._known_weights()).commit(push_id, version, flush_cache=flush_cache)

    async def abort_push(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._weights is not None:
            await self._weights.abort(push_id)

    # -------------------------------------------------------------------------------------- what it serves

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a folder of a model or of adapters as `version`, whatever was served before: the first call to one."""
        weights = await self._known_weights()
        await self.pause(PauseMode.RETRACT)
        try:
            await weights.load(model, version)
        finally:
            await self.resume()

    async def info(self) -> EngineInfo:
        """The model that it serves, and the current weight version."""
        epoch = self._weights.epoch if self._weights is not None else 0
        started = self._decode(decode_started, MODELS, await self._transport.get(MODELS))
        label = self._decode(decode_label, WEIGHT_INFO, await self._transport.get(WEIGHT_INFO))
        model = await self._model_in(started.model)
        begun_with = started.adapter or started.model
        served = Served(source=begun_with if label == UNLABELLED else None, label=label)
        self._dialect.applies_adapter = started.adapter is not None
        if self._weights is None:
            loader = VllmLoader(self._transport)
            known = replace(model, has_adapters=started.adapter is not None)
            receiver = VllmReceiver(self._transport, loader)
            self._weights = ServerWeights(loader, self._folders, known, served, receiver=receiver)
        else:
            await self._weights.found(served, epoch)
        limit = self._max_context_tokens or started.max_context_tokens
        self._info = EngineInfo(
            model_path=str(started.model),
            weight_version=served.version or WeightVersion(),
            vocab_size=model.vocab_size,
            max_context_tokens=min(limit, started.max_context_tokens),
            has_grammar=True,
        )
        return self._info

    async def stats(self) -> EngineStats:
        """How many requests it runs now, and what it has sampled since it started."""
        version = (await self._known_weights()).serving.version or WeightVersion()
        text = await self._transport.text(METRICS)
        return self._decode(lambda body: decode_metrics(body, version), METRICS, text)

    async def health(self) -> bool:
        """Whether its scheduler answers, paused or not, and its weights are known."""
        try:
            await self._transport.get(IS_PAUSED, timeout_s=HEALTH_TIMEOUT_S)
            if self._weights is not None:
                self._weights.require_known()
        except EngineError:
            return False
        return True

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        await wait_until_healthy(f"the vLLM server at {self.base_url}", self.health, timeout_s)

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        weights, self._weights = self._weights, None
        if weights is not None:
            await weights.aclose()
        await self._transport.aclose()

    # ------------------------------------------------------------------------------------------- internals

    def _label(self) -> str:
        return self._weights.serving.label if self._weights is not None else UNLABELLED

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

    def _decode(self, decode: Callable[[Body], T], path: str, body: Body) -> T:
        try:
            return decode(body)
        except WireError as error:
            raise self._transport.unreadable(path, error) from error
