"""Requests that are aborted while the engine hangs:

- they return nothing, and the waiting task goes on without being cancelled: also when they are aborted twice, when
  several were made together, and when the engine answers its cancellation with a result or an error
- a caller that is cancelled meanwhile stays cancelled
"""

import asyncio
from collections.abc import Callable

import pytest

from areal_agent.errors import EngineUnreachable
from areal_agent.gateway.answers import NOTHING, EngineCalls
from areal_agent.gateway.metrics import Counters
from areal_agent.types import GenerateRequest, GenerateResult, SamplingParams, TokenChunk


class HangingEngine:
    """Samples for ever, and hears no abort."""

    def __init__(self, *, says: "GenerateResult | Exception | None" = None) -> None:
        self._says = says

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if isinstance(self._says, Exception):
                raise self._says from None
            if self._says is not None:
                return self._says
            raise
        raise AssertionError("nobody sets it")

    async def abort(self, request_id: str) -> None:
        await asyncio.Event().wait()


class Caller:
    """Samples in a task of its own, and tells what it got and how often it is cancelled then."""

    def __init__(self, num_requests: int = 1, *, says: "GenerateResult | Exception | None" = None) -> None:
        self.calls = EngineCalls(HangingEngine(says=says), Counters(), abort_grace_s=0)
        self.requests = [
            GenerateRequest(request_id=f"r{number}", input_ids=(1,), sampling=SamplingParams())
            for number in range(num_requests)
        ]
        self.task = asyncio.create_task(self._sample())

    async def _sample(self) -> tuple[object, int]:
        task = asyncio.current_task()
        assert task is not None
        try:
            got: object = await self.calls.sample(self.requests)
        except EngineUnreachable as error:
            got = error
        return got, task.cancelling()


async def begun(caller: Caller) -> Caller:
    for _ in range(3):  # its task begins, those of its requests begin, the engine hangs
        await asyncio.sleep(0)
    return caller


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("num_ends", [1, 2, 3])
async def test_ended_requests_give_nothing(num_requests: int, num_ends: int) -> None:
    caller = await begun(Caller(num_requests))
    for _ in range(num_ends):
        for request in caller.requests:
            caller.calls.abort_soon(request.request_id)
    await caller.calls.abort_all()
    assert await caller.task == ([NOTHING] * num_requests, 0)


async def test_engine_that_answers_its_cancellation_leaves_its_caller_uncancelled() -> None:
    failure = EngineUnreachable("gone")
    for says, expected in ((NOTHING, [NOTHING]), (failure, failure)):
        caller = await begun(Caller(says=says))
        await caller.calls.abort_all()
        assert await caller.task == (expected, 0)


async def test_cancelled_caller_is_cancelled() -> None:
    caller = await begun(Caller())
    ending = asyncio.create_task(caller.calls.abort_all())
    while not caller.task.cancelling():  # noqa: ASYNC110 (until the request is given up: nothing tells)
        await asyncio.sleep(0)
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.task
    await ending
