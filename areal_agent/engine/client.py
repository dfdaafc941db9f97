"""The client of an engine on SGLang's wire: `wire/` has the fields of its bodies, `transport.py` carries them.

Every failure becomes one of three errors: `EngineRejected` (the request is wrong), `WeightUpdateError` (the old
version still serves), `EngineUnreachable` (no answer, or an unreadable one).
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from areal_agent.engine.pushes import size_of
from areal_agent.engine.transport import CONTROL_TIMEOUT_S, Transport, wait_until_healthy
from areal_agent.engine.wire import control, generate
from areal_agent.engine.wire.control import EngineStats
from areal_agent.engine.wire.fields import Message
from areal_agent.engine.wire.generate import check_request
from areal_agent.errors import EngineError, WeightUpdateError
from areal_agent.types import (
    DiskWeights,
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SharedMemoryWeights,
    TokenChunk,
    Weights,
    WeightVersion,
)

HEALTH_TIMEOUT_S = 5.0
QUIET_ABORT_TIMEOUT_S = 10.0  # of a cancelled call, whose connection is closed as well


class HttpEngine:
    """Implements `protocols.Engine` over HTTP. Use it from one event loop, and `aclose` it."""

    def __init__(self, base_url: str, *, key: str | None = None, control_timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self._transport = Transport(base_url, key=key, control_timeout_s=control_timeout_s)
        self.base_url = self._transport.base_url
        self._info: EngineInfo | None = None
        self._paused: PauseMode | None = None
        self._push_id: str | None = None  # the newest push; pauses belong to it while it is open
        self._aborts: set[asyncio.Task[None]] = set()  # the aborts of cancelled calls; aclose waits for them

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample one completion, without a time limit. Cancelling the call aborts the request."""
        check_request(request, self._info or await self.info())
        try:
            if on_chunk is not None:
                body = generate.encode_request(request, is_streamed=True)

                def take(chunk: TokenChunk) -> None:
                    if chunk.token_ids:
                        on_chunk(chunk)

                return await self._transport.answer(generate.GENERATE, body, generate.ResultReader(), take)
            body = await self._transport.sample(generate.GENERATE, generate.encode_request(request))
        except asyncio.CancelledError:
            self._abort_in_background(request.request_id)
            raise
        return self._transport.decoded(generate.decode_result, generate.GENERATE, body)

    async def abort(self, request_id: str) -> None:
        """End one request; its `generate` returns the tokens so far."""
        await self._transport.post(control.ABORT_REQUEST, control.Abort(rid=request_id).encode())

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling at a token boundary. When this returns, no further token is sampled.

        `wait` takes as long as the requests in flight.
        """
        body = control.Pause(mode=mode, push_id=self._push_id).encode()
        await self._transport.post(control.PAUSE_GENERATION, body, has_limit=mode is not PauseMode.WAIT)
        self._paused = mode

    async def resume(self) -> None:
        """Resume sampling. Raises EngineRejected while another client's push, which may be alive, pauses it."""
        await self._transport.post(control.CONTINUE_GENERATION, control.Continue(push_id=self._push_id).encode())
        self._paused = None

    async def release_memory(self) -> None:
        """Free the memory of keys and values. Requests wait until `resume_memory`, and lose no token."""
        await self._transport.post(control.RELEASE_MEMORY, {})

    async def resume_memory(self) -> None:
        """Allocate that memory again and resume. Raises EngineRejected when it is not available."""
        await self._transport.post(control.RESUME_MEMORY, {})

    async def begin_push(self, push_id: str) -> None:
        """Open a push of weights. Raises PushConflict while another one is open."""
        self._push_id = push_id
        await self._push(control.BEGIN_PUSH, control.Push(push_id=push_id))

    async def send_push(self, push_id: str, weights: Weights) -> None:
        """Load and verify the weights of a push, while the old version serves."""
        await self._push(control.SEND_PUSH, control.PushSend.of(push_id, weights), weights)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        """Serve the weights that were sent. The KV cache is recomputed, except during a pause `in_place`."""
        commit = control.PushCommit(push_id=push_id, weight_version=version, flush_cache=self._flushes_cache)
        await self._push(control.COMMIT_PUSH, commit)

    async def abort_push(self, push_id: str) -> None:
        """Drop a push. If it is not open, that is no error."""
        await self._push(control.ABORT_PUSH, control.Push(push_id=push_id))

    async def update_weights(self, weights: SharedMemoryWeights | DiskWeights, version: WeightVersion) -> None:
        """Swap the weights in one call, all or none, as SGLang does. The KV cache is treated as in `commit_push`."""
        flush = self._flushes_cache
        if isinstance(weights, DiskWeights):
            update = control.DiskUpdate(model_path=weights.path, weight_version=version, flush_cache=flush)
            await self._push(control.UPDATE_FROM_DISK, update, weights)
        else:
            path, entries, crc32 = weights.path, weights.entries, weights.crc32
            update = control.SharedMemoryUpdate(
                path=path, entries=entries, crc32=crc32, weight_version=version, flush_cache=flush
            )
            await self._push(control.UPDATE_FROM_SHARED_MEMORY, update, weights)

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a Hugging Face folder as `version`, whatever was served before."""
        await self.update_weights(DiskWeights(path=str(model)), version)

    # ---------------------------------------------------------------------------------------------- status

    async def info(self) -> EngineInfo:
        """Return the model that the engine serves, and the current weight version."""
        answer = await self._transport.get(control.SERVER_INFO)
        self._info = self._transport.decoded(control.decode_info, control.SERVER_INFO, answer)
        return self._info

    async def stats(self) -> EngineStats:
        """Return the engine's work since it started."""
        answer = await self._transport.get(control.SERVER_INFO)
        return self._transport.decoded(control.decode_stats, control.SERVER_INFO, answer)

    async def health(self) -> bool:
        """Return whether the engine answers and its model thread is alive."""
        try:
            await self._transport.get(control.HEALTH, timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine serves. Raises EngineUnreachable if it does not within `timeout_s`."""
        await wait_until_healthy(f"the engine at {self.base_url}", self.health, timeout_s)

    async def aclose(self) -> None:
        """Close the connections. A second call does nothing."""
        await asyncio.gather(*self._aborts)
        await self._transport.aclose()

    # ------------------------------------------------------------------------------------------- internals

    @property
    def _flushes_cache(self) -> bool:
        return self._paused is not PauseMode.IN_PLACE

    async def _push(self, path: str, body: Message, weights: Weights | None = None) -> None:
        num_bytes = 0 if weights is None else await asyncio.to_thread(size_of, weights)
        await self._transport.post(path, body.encode(), refusal=WeightUpdateError, num_bytes=num_bytes)

    def _abort_in_background(self, request_id: str) -> None:
        """Abort a request without waiting: its caller was cancelled, and nobody needs further tokens."""
        task = asyncio.create_task(self._abort_quietly(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # an engine that does not answer samples for nobody either
            async with asyncio.timeout(QUIET_ABORT_TIMEOUT_S):
                await self.abort(request_id)
