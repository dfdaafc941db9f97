"""A scripted engine in this process: no model, no sockets, no clock, the same answers every time.

It keeps the promises of `protocols.Engine`: a pause really holds requests back, an abort returns what was sampled, a
token bears the version that was current when it was sampled. With `is_stepped` nothing is sampled until the test
calls `step`, so a weight swap can fall between any two tokens. With a `clock` (virtual_clock.py) every request in
flight gets a token each `token_s` seconds of it, in no time of ours. A streamed request gets one chunk a `step`;
without `is_stepped`, one chunk a token.

What goes wrong with real engines can be made to go wrong here, once each:

    fail_next(operation, error)   the next such call raises
    hang_next(operation)          it never ends, until it is cancelled or `recover` is called
    die_after(num_tokens)         in the middle of a turn: requests in flight and all later calls find nobody,
                                  until `recover`
    garble_next(garbage)          the next answer breaks one promise of `GenerateResult`
    corrupt_next_push()           a bit of the weights is flipped on their way: their digests tell, the push is
                                  refused, and the old version goes on

>>> import asyncio
>>> from areal_agent.engine_types import DiskWeights
>>> from areal_agent.types import SamplingParams
>>> async def interrupted() -> tuple[int, ...]:
...     engine = FakeEngine([[11, 12, 13, 14]], version=WeightVersion(step=7), is_stepped=True)
...     request = GenerateRequest(request_id="r1", input_ids=(1,), sampling=SamplingParams(max_tokens=8))
...     answer = asyncio.ensure_future(engine.generate(request))
...     await engine.wait_for_requests(1)
...     engine.step(2)
...     await engine.pause(PauseMode.RETRACT)
...     await engine.update_weights(DiskWeights(path="new"), WeightVersion(step=8))
...     await engine.resume()
...     engine.step(2)
...     return tuple(s.version.step for s in (await answer).versions for _ in range(s.start, s.end))
>>> asyncio.run(interrupted())
(7, 7, 8, 8)
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from areal_agent.engine.fake_faults import Faults, Garbage, Operation, garbled
from areal_agent.engine.fake_row import FakeRow, fake_logprob, fake_top_logprobs
from areal_agent.engine.fake_weights import FakeWeights
from areal_agent.engine.limits import check_request
from areal_agent.engine.pushes import Pushes
from areal_agent.engine.virtual_clock import VirtualClock
from areal_agent.engine_types import (
    DiskWeights,
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SharedMemoryWeights,
    TokenChunk,
    Weights,
)
from areal_agent.errors import EngineError, EngineRejected
from areal_agent.types import FinishReason, WeightVersion

__all__ = [
    "FakeEngine",
    "Garbage",
    "Operation",
    "Reply",
    "Script",
    "VirtualClock",
    "fake_logprob",
    "fake_top_logprobs",
]

Reply = Sequence[int] | Exception
"""The ids that one request is answered with (an end token included where there should be one), or what it raises."""

Script = Sequence[Reply] | Callable[[GenerateRequest], Reply]
"""One reply a request in the order of their arrival, or a function of the request."""


class FakeEngine:
    """A `protocols.Engine` that answers from a script. Use it from one event loop."""

    def __init__(
        self,
        script: Script,
        *,
        version: WeightVersion | None = None,
        vocab_size: int = 1_000_000,
        max_context_tokens: int = 1_000_000,
        has_grammar: bool = False,
        is_stepped: bool = False,
        clock: VirtualClock | None = None,
        token_s: float = 0.02,
    ) -> None:
        self.paused: PauseMode | None = None
        self.requests: list[GenerateRequest] = []  # every request that was accepted, in order
        self.aborted_ids: list[str] = []  # every abort that was asked for, cancelled calls included
        self.weights: list[Weights] = []  # every update that was taken
        self._script = script
        self._vocab_size = vocab_size
        self._max_context_tokens = max_context_tokens
        self._has_grammar = has_grammar
        self._is_stepped = is_stepped
        self._clock = clock
        self._token_s = token_s
        self._is_ticking = False
        self._running: dict[str, FakeRow] = {}
        self._faults = Faults()
        self._weights = FakeWeights(version=version or WeightVersion(), faults=self._faults, updates=self.weights)
        self._pushes = Pushes(self._weights)
        self._arrived = asyncio.Condition()

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        await self._faults.strike(Operation.GENERATE)
        check_request(request, self.info())
        if request.request_id in self._running:
            raise EngineRejected(f"request_id {request.request_id!r} is in flight already; make ids unique")
        running = FakeRow(request=request, reply=self._next_reply(request), on_chunk=on_chunk)
        self.requests.append(replace(request, input_ids=tuple(request.input_ids)))
        self._running[request.request_id] = running
        running.is_held = self.paused is PauseMode.WAIT
        try:
            await self._announce()
            self._advance()
            return garbled(await running.answer, self._faults.next_garbage(), self._vocab_size)
        except asyncio.CancelledError:
            self.aborted_ids.append(request.request_id)
            raise
        finally:
            del self._running[request.request_id]

    async def abort(self, request_id: str) -> None:
        await self._faults.strike(Operation.ABORT)
        self.aborted_ids.append(request_id)
        if request_id in self._running:
            self._running[request_id].finish(FinishReason.ABORT)

    async def pause(self, mode: PauseMode) -> None:
        await self._faults.strike(Operation.PAUSE)
        self.paused = mode
        if mode is PauseMode.ABORT:
            for running in self._running.values():
                running.finish(FinishReason.ABORT)
        elif mode is PauseMode.WAIT:
            ending = [row.answer for row in self._running.values() if not row.is_held]
            await asyncio.gather(*ending, return_exceptions=True)

    async def resume(self) -> None:
        await self._faults.strike(Operation.RESUME)
        self.paused = None
        for running in self._running.values():
            running.is_held = False
        self._advance()

    async def begin_push(self, push_id: str) -> None:
        await self._faults.strike(Operation.BEGIN_PUSH)
        self._pushes.begin(push_id)

    async def send_push(self, push_id: str, weights: Weights) -> None:
        await self._faults.strike(Operation.SEND_PUSH)
        await self._pushes.send(push_id, weights)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        await self._faults.strike(Operation.COMMIT_PUSH)
        await self._pushes.commit(push_id, version, flush_cache=True)

    async def abort_push(self, push_id: str) -> None:
        await self._faults.strike(Operation.ABORT_PUSH)
        self._pushes.abort(push_id)

    async def update_weights(self, weights: SharedMemoryWeights | DiskWeights, version: WeightVersion) -> None:
        """The swap in one call."""
        await self._faults.strike(Operation.UPDATE_WEIGHTS)
        await self._weights.swap(await self._weights.take(weights), version, flush_cache=True)

    # -------------------------------------------------------------------------------------- test controls

    @property
    def version(self) -> WeightVersion:
        """That serves; a test may set it."""
        return self._weights.version

    @version.setter
    def version(self, version: WeightVersion) -> None:
        self._weights.version = version

    def info(self) -> EngineInfo:
        """What the engine says of itself."""
        return EngineInfo(
            model_path="fake",
            weight_version=self.version,
            vocab_size=self._vocab_size,
            max_context_tokens=self._max_context_tokens,
            has_grammar=self._has_grammar,
        )

    @property
    def num_in_flight(self) -> int:
        """Requests that have no answer yet."""
        return sum(not running.answer.done() for running in self._running.values())

    def step(self, num_tokens: int = 1) -> int:
        """Sample up to `num_tokens` for every request in flight, none while paused. Returns how many were sampled."""
        if self.paused not in (None, PauseMode.WAIT):
            return 0
        num_sampled = 0
        for running in self._running.values():
            if not running.is_held:
                num_sampled += self._faults.live(running.sample(self._faults.lifetime(num_tokens), self.version))
        if self._faults.is_dead:
            for running in self._running.values():
                running.fail(self._faults.nobody_there())
        return num_sampled

    async def wait_for_requests(self, num_requests: int) -> None:
        """Wait until this many requests have arrived since the start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= num_requests)

    # -------------------------------------------------------------------------------------------- faults

    def fail_next(self, operation: Operation, error: Exception) -> None:
        """Make the next call of `operation` raise `error`; several failures queue up."""
        self._faults.fail_next(operation, error)

    def hang_next(self, operation: Operation) -> None:
        """Make the next call of `operation` wait until it is cancelled, or `recover` is called."""
        self._faults.hang_next(operation)

    def die_after(self, num_tokens: int) -> None:
        """Be gone once so many tokens have been sampled from now on, whoever they belong to; 0: now."""
        self._faults.die_after(num_tokens)
        self.step(0)

    def recover(self) -> None:
        """Be there again: calls that hang go on, and later ones are answered. What was in flight is lost."""
        self._faults.recover()

    def garble_next(self, garbage: Garbage) -> None:
        """Make the next answer break a promise; chunks that were handed out before are not garbled."""
        self._faults.garble_next(garbage)

    def corrupt_next_push(self) -> None:
        """Flip a bit of the next weights on their way: they are refused, and the old version goes on."""
        self._faults.corrupt_next_push()

    # ------------------------------------------------------------------------------------------- internals

    def _next_reply(self, request: GenerateRequest) -> tuple[int, ...]:
        if callable(self._script):
            reply = self._script(request)
        elif len(self.requests) < len(self._script):
            reply = self._script[len(self.requests)]
        else:
            raise EngineError(f"the script has {len(self._script)} replies and this is one request more; extend it")
        if isinstance(reply, Exception):
            self.requests.append(request)  # it used up its reply
            raise reply
        return tuple(reply)

    async def _announce(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    def _advance(self) -> None:
        """Sample all there is, a token at a time, unless the test or the clock does it."""
        if self._clock is not None:
            self._tick_later(self._clock)
        else:
            while not self._is_stepped and self.step():
                pass

    def _tick_later(self, clock: VirtualClock) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            clock.call_later(self._token_s, lambda: self._tick(clock))

    def _tick(self, clock: VirtualClock) -> None:
        self._is_ticking = False
        if self.step():
            self._tick_later(clock)
