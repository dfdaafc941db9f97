"""A scripted engine in this process, for tests: no model, no sockets, no clock, and the same answers every time.

It keeps the promises of `protocols.Engine`: a pause really holds requests back, an abort returns what was sampled, and
a token has the version that was current when it was sampled. With `is_stepped` nothing is sampled until the test
calls `step`, so a weight swap can fall between any two tokens. With a `clock` (`VirtualClock`) every request in flight
gets a token each `token_s` virtual seconds. A streamed request gets one chunk for each `step`; without `is_stepped`,
one chunk for each token.

The failures of real engines can be planned, once each: `fail_next`, `hang_next`, `die_after`, `garble_next` and
`corrupt_next_push`; `planned` has those that have not happened yet. A plan that can never happen raises ValueError.

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
import math
import operator
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from areal_agent.engine.pushes import Pushes, take_folder, take_shared_memory, weight_files
from areal_agent.engine.wire.generate import check_request
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import (
    DeviceWeights,
    DiskWeights,
    DistributedWeights,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SamplingParams,
    SharedMemoryWeights,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
    Weights,
    WeightVersion,
)

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
    """A request in flight. `on_chunk` gets what each call of `sample` adds."""

    request: GenerateRequest
    reply: Sequence[int]  # all that it may sample
    reason: FinishReason  # why it ends there
    on_chunk: Callable[[TokenChunk], None] | None
    is_held: bool  # it arrived during a pause in which no request may begin
    versions: list[WeightVersion] = field(default_factory=list[WeightVersion])  # one for each sampled token
    answer: asyncio.Future[GenerateResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def sample(self, num_tokens: int, version: WeightVersion) -> int:
        """Sample up to `num_tokens` more tokens of the reply; return how many there were."""
        if self.answer.done():
            return 0
        start = len(self.versions)
        self.versions += [version] * min(num_tokens, len(self.reply) - start)
        if self.on_chunk is not None and len(self.versions) > start:
            self.on_chunk(self._chunk(start))
        if len(self.versions) == len(self.reply):
            self.finish(self.reason)
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
                versions=sampled.versions,
                finish_reason=reason,
                top_logprobs=sampled.top_logprobs,
            )
        )

    def _chunk(self, start: int) -> TokenChunk:
        """Return the sampled tokens from index `start` on."""
        positions, num_top = range(start, len(self.versions)), self.request.num_top_logprobs
        return TokenChunk(
            token_ids=tuple(self.reply[i] for i in positions),
            logprobs=tuple(fake_logprob(self.reply[i], i) for i in positions),
            top_logprobs=tuple(fake_top_logprobs(self.reply[i], i, num_top) for i in positions if num_top),
            versions=VersionSpan.of_tokens(self.versions[start:]),
        )


def _until_its_end(reply: Sequence[int], sampling: SamplingParams) -> tuple[Sequence[int], FinishReason]:
    """Return the part of a reply that is sampled, without end tokens before `min_tokens`, and why it ends there."""
    sampled: list[int] = []
    for token_id in reply:
        is_end = token_id in sampling.stop_token_ids
        if len(sampled) == sampling.max_tokens:
            return sampled, FinishReason.LENGTH
        if not is_end or len(sampled) >= sampling.min_tokens:
            sampled.append(token_id)
            if is_end:
                break
    return sampled, FinishReason.STOP


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


def _garbled(result: GenerateResult, garbage: Garbage, vocab_size: int) -> GenerateResult:
    """Return the answer with one promise broken."""
    match garbage:
        case Garbage.ID_OUTSIDE:
            return replace(result, token_ids=(*result.token_ids[:-1], vocab_size))
        case Garbage.LOGPROB_MISSING:
            return replace(result, logprobs=result.logprobs[:-1])
        case Garbage.LOGPROB_NAN:
            return replace(result, logprobs=(*result.logprobs[:-1], float("nan")))
        case Garbage.VERSIONS_MISSING:
            return replace(result, versions=())


def _verify(weights: Weights, *, is_damaged: bool) -> None:
    """Raise WeightUpdateError if stored weights do not match their digests.

    A path that does not exist is a name in a test's script, and is accepted unless it is to be damaged.
    """
    if isinstance(weights, DistributedWeights | DeviceWeights):
        raise WeightUpdateError("the scripted engine joins no group and opens no GPU; send shared memory or a folder")
    if not Path(weights.path).exists():
        if is_damaged:
            raise WeightUpdateError(f"there is no {weights.path!r}, so the whole push counts as damaged")
    elif is_damaged:
        with tempfile.TemporaryDirectory() as folder:
            _verify(_with_a_flipped_bit(weights, Path(folder) / "weights"), is_damaged=False)
    elif isinstance(weights, DiskWeights):
        take_folder(weights)
    else:
        take_shared_memory(weights)


def _with_a_flipped_bit(weights: DiskWeights | SharedMemoryWeights, copy: Path) -> DiskWeights | SharedMemoryWeights:
    if isinstance(weights, DiskWeights):
        shutil.copytree(weights.path, copy)
        file = copy / weight_files(copy)[0]
    else:
        file = Path(shutil.copyfile(weights.path, copy))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return replace(weights, path=str(copy))


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
        """Call `action` in `delay_s` seconds. Raises ValueError below 0."""
        _require_forward("delay_s", delay_s)
        heapq.heappush(self._due, (self.now_s + delay_s, self._num_planned, action))
        self._num_planned += 1

    def advance(self, duration_s: float) -> None:
        """Let time pass. Actions that become due meanwhile, even if planned meanwhile, run at their time.

        Raises ValueError below 0.
        """
        _require_forward("duration_s", duration_s)
        end_s = self.now_s + duration_s
        while self._due and self._due[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = end_s


def _require_forward(name: str, seconds: float) -> None:
    if not seconds >= 0:  # NaN, too
        raise ValueError(f"{name} is {seconds!r}, and this clock never goes back; give seconds from 0 on")


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
        if not (callable(script) or isinstance(script, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"the script is {script!r:.80}; give a list of replies, or a function of the request")
        self.version = version or WeightVersion()  # the one that serves; a test may set it
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
        self._pushes = Pushes(self)
        self._arrived = asyncio.Condition()
        self._faults: defaultdict[Operation, deque[Exception | asyncio.Event]] = defaultdict(deque)
        self._recovered = asyncio.Event()
        self._garbage: deque[Garbage] = deque()
        self._num_corrupt = 0  # pushes whose bytes arrive damaged
        self._lifetime = math.inf  # number of tokens until the engine dies

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        await self._strike(Operation.GENERATE)
        check_request(request, self.info())
        if request.request_id in self._running:
            raise EngineRejected(f"request_id {request.request_id!r} is in flight already; make ids unique")
        reply, reason = _until_its_end(self._next_reply(request), request.sampling)
        row = FakeRow(
            request=request, reply=reply, reason=reason, on_chunk=on_chunk, is_held=self.paused is PauseMode.WAIT
        )
        self.requests.append(replace(request, input_ids=tuple(request.input_ids)))
        self._running[request.request_id] = row
        try:
            await self._announce()
            self._advance()
            result = await row.answer
            is_garbled = self._garbage and result.token_ids  # an empty answer promises nothing that could be broken
            return _garbled(result, self._garbage.popleft(), self._vocab_size) if is_garbled else result
        except asyncio.CancelledError:
            self.aborted_ids.append(request.request_id)
            raise
        finally:
            del self._running[request.request_id]

    async def abort(self, request_id: str) -> None:
        await self._strike(Operation.ABORT)
        self.aborted_ids.append(request_id)
        if request_id in self._running:
            self._running[request_id].finish(FinishReason.ABORT)

    async def pause(self, mode: PauseMode) -> None:
        await self._strike(Operation.PAUSE)
        self.paused = mode
        if mode is PauseMode.ABORT:
            for row in self._running.values():
                row.finish(FinishReason.ABORT)
        elif mode is PauseMode.WAIT:
            ending = [row.answer for row in self._running.values() if not row.is_held]
            await asyncio.gather(*ending, return_exceptions=True)

    async def resume(self) -> None:
        await self._strike(Operation.RESUME)
        self.paused = None
        for row in self._running.values():
            row.is_held = False
        self._advance()

    async def begin_push(self, push_id: str) -> None:
        await self._strike(Operation.BEGIN_PUSH)
        self._pushes.begin(push_id)

    async def send_push(self, push_id: str, weights: Weights) -> None:
        await self._strike(Operation.SEND_PUSH)
        await self._pushes.send(push_id, weights)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        await self._strike(Operation.COMMIT_PUSH)
        await self._pushes.commit(push_id, version, flush_cache=True)

    async def abort_push(self, push_id: str) -> None:
        await self._strike(Operation.ABORT_PUSH)
        self._pushes.abort(push_id)

    async def update_weights(self, weights: SharedMemoryWeights | DiskWeights, version: WeightVersion) -> None:
        """Swap the weights in one call."""
        await self._strike(Operation.UPDATE_WEIGHTS)
        await self.swap(await self.take(weights), version, flush_cache=True)

    # ---------------------------------------------------------------------------------- pushes.PushTarget

    async def take(self, weights: Weights) -> Weights:
        is_corrupt, self._num_corrupt = self._num_corrupt > 0, max(0, self._num_corrupt - 1)
        _verify(weights, is_damaged=is_corrupt)
        return weights

    async def holds(self, taken: Weights) -> bool:
        return True  # there is no model that could differ

    async def swap(self, taken: Weights, version: WeightVersion, *, flush_cache: bool) -> None:
        self.weights.append(taken)
        self.version = version

    # -------------------------------------------------------------------------------------- test controls

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
        return sum(not row.answer.done() for row in self._running.values())

    def step(self, num_tokens: int = 1) -> int:
        """Sample up to `num_tokens` for every request in flight, none while paused. Return how many were sampled."""
        if self.paused not in (None, PauseMode.WAIT):
            return 0
        num_sampled = 0
        for row in self._running.values():
            if not row.is_held:
                num_new = row.sample(int(min(num_tokens, self._lifetime)), self.version)
                self._lifetime -= num_new
                num_sampled += num_new
        for row in self._running.values() if self._lifetime == 0 else ():
            if not row.answer.done():
                row.answer.set_exception(_nobody_there())
        return num_sampled

    async def wait_for_requests(self, num_requests: int) -> None:
        """Wait until this many requests have arrived since the start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= num_requests)

    # ---------------------------------------------------------------------------------------------- faults

    @property
    def planned(self) -> list[str]:
        """The faults that have not happened yet: a test that plans some ends with `assert engine.planned == []`."""
        calls = [
            f"{'fail' if isinstance(fault, Exception) else 'hang'}_next({operation})"
            for operation, faults in self._faults.items()
            for fault in faults
        ]
        death = [f"die_after({self._lifetime})"] if 0 < self._lifetime < math.inf else []
        garbage = [f"garble_next({one})" for one in self._garbage]
        return [*calls, *death, *garbage, *["corrupt_next_push()"] * self._num_corrupt]

    def fail_next(self, operation: Operation, error: Exception) -> None:
        """Make the next call of `operation` raise `error`; several failures queue up."""
        if not isinstance(error, Exception):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{error!r} is no exception that {operation} could raise; give one, EngineError('...')")
        self._faults[_one_of(Operation, operation)].append(error)

    def hang_next(self, operation: Operation) -> None:
        """Make the next call of `operation` wait until it is cancelled, or `recover` is called."""
        self._faults[_one_of(Operation, operation)].append(self._recovered)

    def die_after(self, num_tokens: int) -> None:
        """Die once this many tokens have been sampled from now on, by any requests; 0: now."""
        if not (isinstance(num_tokens, int) and num_tokens >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"num_tokens is {num_tokens!r}; give a whole number of tokens from 0 on")
        self._lifetime = num_tokens
        self.step(0)

    def recover(self) -> None:
        """Work again: calls that hang continue, and later calls are answered. Requests in flight are lost."""
        self._lifetime = math.inf
        self._recovered.set()
        self._recovered = asyncio.Event()

    def garble_next(self, garbage: Garbage) -> None:
        """Make the next answer that has tokens break a promise; chunks that were handed out before are not garbled."""
        self._garbage.append(_one_of(Garbage, garbage))

    def corrupt_next_push(self) -> None:
        """Flip a bit of the next weights in transit: they are refused, and the old version keeps serving."""
        self._num_corrupt += 1

    # ------------------------------------------------------------------------------------------- internals

    async def _strike(self, operation: Operation) -> None:
        """Carry out the fault that is planned for the next call of `operation`, if any."""
        if self._lifetime == 0:
            raise _nobody_there()
        if not self._faults[operation]:
            return
        fault = self._faults[operation].popleft()
        if isinstance(fault, Exception):
            raise fault
        await fault.wait()

    def _next_reply(self, request: GenerateRequest) -> Sequence[int]:
        if callable(self._script):
            reply = self._script(request)
        elif len(self.requests) < len(self._script):
            reply = self._script[len(self.requests)]
        else:
            raise EngineError(f"the script has {len(self._script)} replies, but there is one more request; extend it")
        if isinstance(reply, Exception):
            self.requests.append(request)  # it used up its reply
            raise reply
        return self._ids_of(reply)

    def _ids_of(self, reply: Sequence[int]) -> tuple[int, ...]:
        try:
            ids = tuple(map(operator.index, reply))
        except TypeError:
            raise EngineError(f"a reply of the script is {reply!r:.80}; give the ids of tokens, or an error") from None
        if odd := [one for one in ids if not 0 <= one < self._vocab_size]:
            raise EngineError(
                f"a reply of the script has the id {odd[0]}, outside the vocabulary of {self._vocab_size} ids; only "
                f"garble_next({Garbage.ID_OUTSIDE!r}) breaks that promise"
            )
        return ids

    async def _announce(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()

    def _advance(self) -> None:
        """Sample everything, a token at a time, unless the test or the clock does it."""
        if self._clock is None:
            while not self._is_stepped and self.step():
                pass
        elif not self._is_ticking:
            self._is_ticking = True
            self._clock.call_later(self._token_s, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        if self.step():
            self._advance()


Member = TypeVar("Member", bound=StrEnum)


def _one_of(members: type[Member], given: str) -> Member:
    try:
        return members(given)
    except ValueError:
        raise ValueError(f"{given!r} is no {members.__name__}; give one of {', '.join(members)}") from None


def _nobody_there() -> EngineUnreachable:
    return EngineUnreachable("the scripted engine has died as planned; call recover()")
