"""The engine requests of one session: made together, ended together. Knows nothing of conversations."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from hashlib import blake2b

from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk
from areal_agent.errors import EngineError
from areal_agent.gateway.sampling import MAX_SEED
from areal_agent.gateway.stats import Counters
from areal_agent.protocols import Sampler
from areal_agent.types import FinishReason, SamplingParams

NOTHING = GenerateResult(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORT)
"""What a request gave that was ended before it gave anything."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Who hears of requests while they run, each with its place among them. Neither may block or raise."""

    on_chunk: Callable[[int, TokenChunk], None]
    on_result: Callable[[int, GenerateResult], None]


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Running:
    """A request in flight, in the task that waits for it."""

    task: "asyncio.Task[object]"
    ended: "asyncio.Future[None]"
    is_given_up: bool = False  # it was ended, and took too long


class EngineCalls:
    """Requests in flight. After `abort_all` no new ones are made."""

    def __init__(self, sampler: Sampler, counters: Counters, *, abort_grace_s: float) -> None:
        self._sampler = sampler
        self._counters = counters
        self._abort_grace_s = abort_grace_s
        self._running: dict[str, _Running] = {}  # by request id
        self._aborts: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def sample(self, requests: Sequence[GenerateRequest], watch: Watch | None = None) -> list[GenerateResult]:
        """Sample all at once. When one fails, or the call is cancelled, the others are ended.

        Raises what the engine raised.
        """
        if len(requests) == 1:
            return [await self._sample_one(requests[0], 0, watch)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._sample_one(request, index, watch)) for index, request in enumerate(requests)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def abort_soon(self, request_id: str) -> None:
        """End one request, from where nothing can wait: it gives what it has, or nothing after the grace."""
        if request_id in self._running:
            task = asyncio.create_task(self._end([request_id]))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def abort_all(self) -> None:
        """End all requests: they give what they have. Those that take longer than the grace give nothing."""
        self._is_closed = True
        await self._end(list(self._running))
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def _end(self, request_ids: Sequence[str]) -> None:
        running = [self._running[request_id] for request_id in request_ids if request_id in self._running]
        if not running:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._abort_grace_s):
                await asyncio.gather(*map(self._abort, request_ids))
                await asyncio.wait([one.ended for one in running])
        for one in running:
            if not one.ended.done() and not one.is_given_up:  # twice cancelled, it could not be told from its caller
                one.is_given_up = True
                one.task.cancel()
        await asyncio.wait([one.ended for one in running])

    async def _sample_one(self, request: GenerateRequest, index: int, watch: Watch | None) -> GenerateResult:
        """Sample in the task of the caller, which is not cancelled when the request is given up."""
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        running = self._running[request.request_id] = _Running(
            task=task, ended=asyncio.get_running_loop().create_future()
        )
        try:
            return await self._generate(request, index, watch)
        except asyncio.CancelledError:
            if running.is_given_up and task.cancelling() == num_cancelled + 1:
                return NOTHING
            raise
        finally:
            if running.is_given_up:
                task.uncancel()
            del self._running[request.request_id]
            running.ended.set_result(None)

    async def _generate(self, request: GenerateRequest, index: int, watch: Watch | None) -> GenerateResult:
        if self._is_closed:
            return NOTHING
        with self._counters.engine.one():
            if watch is None:
                result = await self._sampler.generate(request)
            else:
                result = await self._sampler.generate(request, lambda chunk: watch.on_chunk(index, chunk))
                watch.on_result(index, result)
        self._counters.generated_tokens += len(result.token_ids)
        return result

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):  # an engine that is gone samples nothing
            await self._sampler.abort(request_id)


def requests_for(
    input_ids: Sequence[int], sampling: SamplingParams, completion_ids: Sequence[str], num_top_logprobs: int
) -> list[GenerateRequest]:
    """One request an answer to the same prompt, each with a seed of its own."""
    return [
        GenerateRequest(
            request_id=_request_id(completion_id),
            input_ids=input_ids,
            sampling=_for_choice(sampling, index),
            num_top_logprobs=num_top_logprobs,
        )
        for index, completion_id in enumerate(completion_ids)
    ]


def _request_id(completion_id: str) -> str:
    """All of one length: no engine may take one for the beginning of another."""
    return blake2b(completion_id.encode(), digest_size=16).hexdigest()


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The first choice is sampled as asked; the others with the seeds that follow."""
    if index == 0 or sampling.seed is None:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + index) & MAX_SEED)
