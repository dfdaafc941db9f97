"""The engine requests of one session: made together, ended together. Knows nothing of conversations."""

import asyncio
import contextlib
import dataclasses
import secrets

from areal_agent.errors import EngineError
from areal_agent.gateway.sampling import MAX_SEED
from areal_agent.gateway.stats import Counters
from areal_agent.protocols import Sampler
from areal_agent.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams

NOTHING = GenerateResult(token_ids=(), logprobs=(), versions=(), finish_reason=FinishReason.ABORT)
"""What a request gave that was ended before it gave anything."""


class EngineCalls:
    """Requests in flight. After `abort_all` no new ones are made."""

    def __init__(self, sampler: Sampler, counters: Counters) -> None:
        self._sampler = sampler
        self._counters = counters
        self._running: dict[str, asyncio.Task[GenerateResult]] = {}  # by request id
        self._is_closed = False

    async def sample(
        self, input_ids: tuple[int, ...], sampling: SamplingParams, num_choices: int
    ) -> list[GenerateResult]:
        """Sample the same prompt several times at once, each with a seed of its own.

        When one fails, or the call is cancelled, the others are ended. Raises what the engine raised.
        """
        requests = [
            GenerateRequest(
                request_id=secrets.token_hex(16), input_ids=input_ids, sampling=_for_choice(sampling, index)
            )
            for index in range(num_choices)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._generate(request)) for request in requests]
                self._running.update((one.request_id, task) for one, task in zip(requests, tasks, strict=True))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for request in requests:
                del self._running[request.request_id]
        return [NOTHING if task.cancelled() else task.result() for task in tasks]

    async def abort_all(self, grace_s: float) -> None:
        """End all requests: they give what they have. Those that take longer than `grace_s` give nothing."""
        self._is_closed = True
        if not self._running:
            return
        tasks = set(self._running.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(self._abort(request_id) for request_id in self._running))
                await asyncio.wait(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        if self._is_closed:
            return NOTHING
        with self._counters.engine.one():
            result = await self._sampler.generate(request)
        self._counters.generated_tokens += len(result.token_ids)
        return result

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):  # an engine that is gone samples nothing
            await self._sampler.abort(request_id)


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The first choice is sampled as asked; the others with the seeds that follow."""
    if index == 0 or sampling.seed is None:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + index) & MAX_SEED)
