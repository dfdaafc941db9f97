"""A scripted engine in this process, for tests: no model, no sockets, no clock, and the same answers every time.

It keeps the promises of `protocols.Engine`: a pause really holds requests back, an abort returns what was sampled, and
a token has the version that was current when it was sampled. With `is_stepped` nothing is sampled until the test
calls `step`, so a weight swap can fall between any two tokens. With a `clock` (`VirtualClock`) every request in flight
gets a token each `token_s` virtual seconds. A streamed request gets one chunk for each `step`; without `is_stepped`,
one chunk for each token.

The failures of real engines can be planned, once each:
    fail_next(operation, error)   the next such call raises
    hang_next(operation)          the next such call never ends, until it is cancelled or `recover` is called
    die_after(num_tokens)         in the middle of a turn, requests in flight and all later calls find no engine, until
                                  `recover`
    garble_next(garbage)          the next answer breaks one promise of `GenerateResult`
    corrupt_next_push()           a bit of the next weights is flipped in transit: the digests reveal it, the push is
                                  refused, and the old version keeps serving

>>> import asyncio
>>> from areal_agent.types import DiskWeights
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
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from areal_agent.engine.limits import check_request
from areal_agent.engine.pushes import Pushes, Spoil, take_folder, take_shared_memory
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    DiskWeights,
    DistributedWeights,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SharedMemoryWeights,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
    Weights,
    WeightVersion,
)

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
"""The ids that answer one request (with an end token if there should be one), or the error that it raises."""

Script = Sequence[Reply] | Callable[[GenerateRequest], Reply]
"""One reply for each request in order of arrival, or a function of the request."""


def fake_logprob(token_id: int, position: int) -> float:
    """Return the log-probability that FakeEngine reports for the token at this position of a completion.

    >>> fake_logprob(5, 0)
    -1.5
    """
    return -0.25 * (1 + (token_id + 7 * position) % 17)


def fake_top_logprobs(token_id: int, position: int, num_top_logprobs: int) -> TopLogprobs:
    """Return the likeliest tokens that FakeEngine reports there: the sampled one, then the smallest other ids.

    >>> fake_top_logprobs(5, 0, 3)
    ((5, -1.5), (0, -1.75), (1, -2.0))
    """
    best = fake_logprob(token_id, position)
    others = [id_ for id_ in range(num_top_logprobs) if id_ != token_id]
    return tuple((id_, best - 0.25 * rank) for rank, id_ in enumerate([token_id, *others][:num_top_logprobs]))


@dataclass(kw_only=True, slots=True, eq=False)
class FakeRow:
    """A request in flight. `answer` is its result; `on_chunk` gets what each call of `sample` adds."""

    request: GenerateRequest
    reply: tuple[int, ...]
    on_chunk: Callable[[TokenChunk], None] | None
    versions: list[WeightVersion] = field(default_factory=list[WeightVersion])  # one for each sampled token
    is_held: bool = False  # it arrived during a pause in which no request may begin
    answer: asyncio.Future[GenerateResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def sample(self, num_tokens: int, version: WeightVersion) -> int:
        """Sample up to `num_tokens` more tokens of the reply; return how many there were."""
        if self.answer.done():
            return 0
        start = len(self.versions)
        limit = min(self.request.sampling.max_tokens, len(self.reply))
        reason: FinishReason | None = None
        while reason is None and len(self.versions) < min(limit, start + num_tokens):
            self.versions.append(version)
            if self.reply[len(self.versions) - 1] in self.request.sampling.stop_token_ids:
                reason = FinishReason.STOP
        if reason is None and len(self.versions) == limit:
            reason = FinishReason.STOP if limit == len(self.reply) else FinishReason.LENGTH
        self._hand_out(start)
        if reason is not None:
            self.finish(reason)
        return len(self.versions) - start

    def finish(self, reason: FinishReason) -> None:
        """Answer with the tokens so far. Does nothing if it was answered before."""
        if self.answer.done():
            return
        sampled = self._chunk(0)
        self.answer.set_result(
            GenerateResult(
                token_ids=sampled.token_ids,
                logprobs=sampled.logprobs,
                versions=_spans(self.versions),
                finish_reason=reason,
                top_logprobs=sampled.top_logprobs,
            )
        )

    def fail(self, error: Exception) -> None:
        """Answer with an error. Does nothing if it was answered before."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def _hand_out(self, start: int) -> None:
        if self.on_chunk is not None and len(self.versions) > start:
            self.on_chunk(self._chunk(start))

    def _chunk(self, start: int) -> TokenChunk:
        """Return the sampled tokens from index `start` on."""
        sampled = list(enumerate(self.reply[: len(self.versions)]))[start:]
        num_top = self.request.num_top_logprobs
        return TokenChunk(
            token_ids=tuple(token_id for _, token_id in sampled),
            logprobs=tuple(fake_logprob(token_id, position) for position, token_id in sampled),
            top_logprobs=tuple(fake_top_logprobs(token_id, position, num_top) for position, token_id in sampled)
            if num_top
            else (),
            versions=_spans(self.versions[start:]),
        )


def _spans(versions: Sequence[WeightVersion]) -> tuple[VersionSpan, ...]:
    if not versions:
        return ()
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(version=versions[start], start=start, end=end) for start, end in zip(starts, ends, strict=True)
    )


class Operation(StrEnum):
    """The calls that can be made to fail or to hang."""

    GENERATE = "generate"
    ABORT = "abort"
    PAUSE = "pause"
    RESUME = "resume"
    UPDATE_WEIGHTS = "update_weights"
    BEGIN_PUSH = "begin_push"
    SEND_PUSH = "send_push"
    COMMIT_PUSH = "commit_push"
    ABORT_PUSH = "abort_push"


class Garbage(StrEnum):
    """The promises of an answer that can be broken."""

    ID_OUTSIDE = "id_outside"  # the last id is outside the vocabulary
    LOGPROB_MISSING = "logprob_missing"  # one log-probability fewer than ids
    LOGPROB_NAN = "logprob_nan"  # the last log-probability is NaN
    VERSIONS_MISSING = "versions_missing"  # no span says which version sampled the tokens


class Faults:
    """The planned faults. Use it from one event loop."""

    def __init__(self) -> None:
        self.is_dead = False
        self._next: dict[Operation, deque[Exception | asyncio.Event]] = {operation: deque() for operation in Operation}
        self._hanging: list[asyncio.Event] = []
        self._garbage: deque[Garbage] = deque()
        self._num_corrupt = 0  # pushes whose bytes arrive damaged
        self._lifetime: int | None = None  # number of tokens until the engine dies; None: never

    def fail_next(self, operation: Operation, error: Exception) -> None:
        self._next[operation].append(error)

    def hang_next(self, operation: Operation) -> None:
        recovered = asyncio.Event()
        self._hanging.append(recovered)
        self._next[operation].append(recovered)

    def garble_next(self, garbage: Garbage) -> None:
        self._garbage.append(garbage)

    def corrupt_next_push(self) -> None:
        self._num_corrupt += 1

    def next_spoil(self) -> Spoil | None:
        """Return how to damage the weights that arrive now, or None."""
        if not self._num_corrupt:
            return None
        self._num_corrupt -= 1
        return _flip_a_bit

    def die_after(self, num_tokens: int) -> None:
        self._lifetime = num_tokens
        self.is_dead = num_tokens == 0

    def recover(self) -> None:
        self.is_dead, self._lifetime = False, None
        for recovered in self._hanging:
            recovered.set()
        self._hanging.clear()

    async def strike(self, operation: Operation) -> None:
        """Carry out the fault that is planned for the next call of `operation`, if any."""
        if self.is_dead:
            raise self.nobody_there()
        if not self._next[operation]:
            return
        fault = self._next[operation].popleft()
        if isinstance(fault, Exception):
            raise fault
        await fault.wait()

    def lifetime(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens are sampled before the engine dies."""
        return num_tokens if self._lifetime is None else min(num_tokens, self._lifetime)

    def live(self, num_tokens: int) -> int:
        """Count `num_tokens` sampled tokens, and return that number."""
        if self._lifetime is not None:
            self._lifetime -= num_tokens
            self.is_dead = self._lifetime == 0
        return num_tokens

    def next_garbage(self) -> Garbage | None:
        return self._garbage.popleft() if self._garbage else None

    @staticmethod
    def nobody_there() -> EngineUnreachable:
        return EngineUnreachable("the scripted engine has died as planned; call recover()")


def _flip_a_bit(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


def garbled(result: GenerateResult, garbage: Garbage | None, vocab_size: int) -> GenerateResult:
    """Return the answer with one promise broken; None breaks nothing."""
    match garbage:
        case None:
            return result
        case Garbage.ID_OUTSIDE:
            return replace(result, token_ids=(*result.token_ids[:-1], vocab_size))
        case Garbage.LOGPROB_MISSING:
            return replace(result, logprobs=result.logprobs[:-1])
        case Garbage.LOGPROB_NAN:
            return replace(result, logprobs=(*result.logprobs[:-1], float("nan")))
        case Garbage.VERSIONS_MISSING:
            return replace(result, versions=())


@dataclass(kw_only=True, slots=True)
class FakeWeights:
    """The scripted engine's weights, a `pushes.PushTarget`. Stored weights are read and verified, not used."""

    version: WeightVersion
    faults: Faults
    updates: list[Weights]  # all that have served since the start, in order

    async def take(self, weights: Weights) -> Weights:
        """Return the weights if their bytes match their digests."""
        prove(weights, self.faults.next_spoil())
        return weights

    async def holds(self, taken: Weights) -> bool:
        return True  # there is no model that could differ

    async def swap(self, taken: Weights, version: WeightVersion, *, flush_cache: bool) -> None:
        self.updates.append(taken)
        self.version = version


def prove(weights: Weights, spoil: Spoil | None) -> None:
    """Raise WeightUpdateError if the bytes do not match their digests.

    A path that does not exist is a name in a test's script, and is accepted unless it is to be damaged.
    """
    if isinstance(weights, DistributedWeights):
        raise WeightUpdateError("the scripted engine joins no process group; send shared memory or a folder")
    if not Path(weights.path).exists():
        if spoil is not None:
            raise WeightUpdateError(f"there is no {weights.path!r}, so the whole push counts as damaged")
    elif isinstance(weights, DiskWeights):
        take_folder(weights, spoil)
    else:
        take_shared_memory(weights, spoil)


class VirtualClock:
    """A clock that only a test advances. Actions that are due run in order, at once, in the test's thread.

    >>> clock = VirtualClock()
    >>> clock.call_later(2.0, lambda: print("at", clock.now_s))
    >>> clock.advance(1.0)
    >>> clock.advance(9.0)
    at 2.0
    >>> clock.now_s
    10.0
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._num_planned = 0  # actions that are due at the same time run in the order in which they were planned

    def call_later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Call `action` in `delay_s` seconds."""
        heapq.heappush(self._due, (self.now_s + delay_s, self._num_planned, action))
        self._num_planned += 1

    def advance(self, duration_s: float) -> None:
        """Let time pass. Actions that become due meanwhile, even if planned meanwhile, run at their time."""
        end_s = self.now_s + duration_s
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = end_s


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
        self.requests: list[GenerateRequest] = []  # every accepted request, in order
        self.aborted_ids: list[str] = []  # every abort that was requested, including cancelled calls
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
        """Swap the weights in one call."""
        await self._faults.strike(Operation.UPDATE_WEIGHTS)
        await self._weights.swap(await self._weights.take(weights), version, flush_cache=True)

    # -------------------------------------------------------------------------------------- test controls

    @property
    def version(self) -> WeightVersion:
        """The version that serves; a test may set it."""
        return self._weights.version

    @version.setter
    def version(self, version: WeightVersion) -> None:
        self._weights.version = version

    def info(self) -> EngineInfo:
        """Return the engine's report about itself."""
        return EngineInfo(
            model_path="fake",
            weight_version=self.version,
            vocab_size=self._vocab_size,
            max_context_tokens=self._max_context_tokens,
            has_grammar=self._has_grammar,
        )

    @property
    def num_in_flight(self) -> int:
        """The number of requests that have no answer yet."""
        return sum(not running.answer.done() for running in self._running.values())

    def step(self, num_tokens: int = 1) -> int:
        """Sample up to `num_tokens` for every request in flight, none while paused. Return how many were sampled."""
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
        """Die once this many tokens have been sampled from now on, by any requests; 0: now."""
        self._faults.die_after(num_tokens)
        self.step(0)

    def recover(self) -> None:
        """Work again: calls that hang continue, and later calls are answered. Requests in flight are lost."""
        self._faults.recover()

    def garble_next(self, garbage: Garbage) -> None:
        """Make the next answer break a promise; chunks that were handed out before are not garbled."""
        self._faults.garble_next(garbage)

    def corrupt_next_push(self) -> None:
        """Flip a bit of the next weights in transit: they are refused, and the old version keeps serving."""
        self._faults.corrupt_next_push()

    # ------------------------------------------------------------------------------------------- internals

    def _next_reply(self, request: GenerateRequest) -> tuple[int, ...]:
        if callable(self._script):
            reply = self._script(request)
        elif len(self.requests) < len(self._script):
            reply = self._script[len(self.requests)]
        else:
            raise EngineError(f"the script has {len(self._script)} replies, but there is one more request; extend it")
        if isinstance(reply, Exception):
            self.requests.append(request)  # it used up its reply
            raise reply
        return tuple(reply)

    async def _announce(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    def _advance(self) -> None:
        """Sample everything, a token at a time, unless the test or the clock does it."""
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
