"""The client of an engine on SGLang's wire. It knows no JSON field (`wire.py`) and nothing of models.

Every failure becomes one of three errors: `EngineRejected` (the request is wrong), `WeightUpdateError` (the old
version still serves), `EngineUnreachable` (no answer, or none that can be read).
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import orjson

from areal_agent.engine import wire
from areal_agent.engine.fields import WireError
from areal_agent.engine.limits import check_request
from areal_agent.engine.wire import EngineStats, WeightUpdate
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    DiskWeights,
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SharedMemoryWeights,
    TokenChunk,
    WeightVersion,
)

CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 120.0  # everything but /generate, which takes as long as it takes
HEALTH_TIMEOUT_S = 5.0
READY_POLL_S = 0.05

T = TypeVar("T")


class HttpEngine:
    """`protocols.Engine` over HTTP. Use it from one event loop, and `aclose` it."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._paused: PauseMode | None = None
        self._aborts: set[asyncio.Task[None]] = set()  # of cancelled calls; aclose waits for them

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample one completion; it may take as long as it takes. Cancelling the call aborts the request."""
        check_request(request, self._info or await self.info())
        try:
            body = await self._post(wire.GENERATE, wire.encode_request(request), EngineRejected, timeout_s=None)
        except asyncio.CancelledError:
            self._abort_in_background(request.request_id)
            raise
        result = self._read(wire.decode_result, body, wire.GENERATE)
        if on_chunk is not None and result.token_ids:
            on_chunk(TokenChunk(token_ids=result.token_ids, logprobs=result.logprobs, top_logprobs=result.top_logprobs))
        return result

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns what it has."""
        await self._post(wire.ABORT_REQUEST, wire.encode_abort(request_id), EngineRejected)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling at a token boundary. When this returns, no further token is sampled."""
        await self._post(wire.PAUSE_GENERATION, wire.encode_pause(mode), EngineRejected)
        self._paused = mode

    async def resume(self) -> None:
        """Go on sampling."""
        await self._post(wire.CONTINUE_GENERATION, {}, EngineRejected)
        self._paused = None

    async def update_weights(self, weights: SharedMemoryWeights | DiskWeights, version: WeightVersion) -> None:
        """Swap the weights, all or none. The KV cache is recomputed, except during a pause `in_place`."""
        flush_cache = self._paused is not PauseMode.IN_PLACE
        path, body = wire.encode_update(WeightUpdate(weights=weights, version=version, flush_cache=flush_cache))
        await self._post(path, body, WeightUpdateError)

    # -------------------------------------------------------------------------------------- what it says

    async def info(self) -> EngineInfo:
        """The model that it serves, and the current weight version."""
        self._info = self._read(wire.decode_info, await self._request("GET", wire.SERVER_INFO), wire.SERVER_INFO)
        return self._info

    async def stats(self) -> EngineStats:
        """Its work since it started."""
        return self._read(wire.decode_stats, await self._request("GET", wire.SERVER_INFO), wire.SERVER_INFO)

    async def health(self) -> bool:
        """Whether it answers and its model thread is alive."""
        try:
            await self._request("GET", wire.HEALTH, timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.health():  # noqa: ASYNC110 (nothing in this process tells when another one serves)
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            raise EngineUnreachable(
                f"the engine at {self.base_url} did not serve within {timeout_s:g} s; "
                "see its log, or raise engine.startup_timeout_s"
            ) from None

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        await asyncio.gather(*self._aborts)
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------------------------------- internals

    def _abort_in_background(self, request_id: str) -> None:
        """The caller was cancelled and must not wait, yet the engine must not go on sampling for nobody."""
        task = asyncio.create_task(self._abort_quietly(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):  # an engine that does not answer samples for nobody either
            await self.abort(request_id)

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        refusal: type[EngineError],
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> object:
        return await self._request("POST", path, body, refusal=refusal, timeout_s=timeout_s)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        refusal: type[EngineError] = EngineRejected,
        timeout_s: float | None = CONTROL_TIMEOUT_S,
    ) -> object:
        try:
            async with self._open().request(
                method,
                self.base_url + path,
                data=None if body is None else orjson.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                status, payload = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise EngineUnreachable(
                f"no answer to {method} {self.base_url}{path}: {cause}; is the engine running? see its log"
            ) from error
        if status == 200:
            return self._read(_json, payload, path)
        message = f"{method} {self.base_url}{path} was answered with {status}: {_error_message(payload)}"
        raise refusal(message) if 400 <= status < 500 else EngineUnreachable(message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # As many connections as requests: the engine queues, the client must not.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        return self._session

    def _read(self, decode: Callable[[Any], T], body: object, path: str) -> T:
        try:
            return decode(body)
        except WireError as error:
            raise EngineUnreachable(
                f"the answer of {self.base_url}{path} cannot be read: {error}; is that an areal_agent engine?"
            ) from error


def _json(payload: bytes) -> object:
    try:
        return orjson.loads(payload) if payload else None
    except orjson.JSONDecodeError as error:
        raise WireError(f"{payload[:80]!r} is not JSON") from error


def _error_message(payload: bytes) -> str:
    try:
        return wire.decode_error(_json(payload))
    except WireError:
        return payload[:200].decode(errors="replace")
