"""The embedded engine streams:

- the joined chunks are the result, which equals that of the same request without streaming
- also over a retraction and a weight swap, with spans of both versions
- tokens leave before the completion has ended
- an abort ends a stream with what there is; a client that hangs up or cancels frees the slot
- refusals are as without streaming; a model thread that dies in mid-stream is EngineUnreachable
"""

import asyncio
import dataclasses
import logging

import aiohttp
import pytest

from areal_agent.engine.wire import generate
from areal_agent.errors import EngineRejected, EngineUnreachable
from areal_agent.types import FinishReason, GenerateRequest, GenerateResult, PauseMode, TokenChunk, WeightVersion

from .sampled import Weights, assert_swapped


class Collected:
    """The chunks of one request, and when they came."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self._grown = asyncio.Event()

    def add(self, chunk: TokenChunk) -> None:
        self.chunks.append(chunk)
        self._grown.set()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id_ for chunk in self.chunks for id_ in chunk.token_ids)

    async def until(self, num_tokens: int) -> None:
        while len(self.token_ids) < num_tokens:
            self._grown.clear()
            await self._grown.wait()

    def assert_make(self, result: GenerateResult) -> None:
        assert self.token_ids == result.token_ids
        assert tuple(p for chunk in self.chunks for p in chunk.logprobs) == result.logprobs
        assert tuple(top for chunk in self.chunks for top in chunk.top_logprobs) == result.top_logprobs


def with_top(request: GenerateRequest, number: int) -> GenerateRequest:
    return dataclasses.replace(request, num_top_logprobs=number)


@pytest.mark.parametrize("number", [0, 3])
async def test_streamed_is_not_streamed(number, tiny, serve, ask):
    requests = [with_top(ask(i, prompt_length=4 + i, max_tokens=1 + 9 * i), number) for i in range(6)]
    collected = [Collected() for _ in requests]
    async with serve(tiny, num_slots=4) as served:
        pairs = zip(requests, collected, strict=True)
        streamed = await asyncio.gather(*(served.engine.generate(request, c.add) for request, c in pairs))
        whole = [await served.engine.generate(request) for request in requests]
    for c, result, expected in zip(collected, streamed, whole, strict=True):
        c.assert_make(result)
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert (result.versions, result.finish_reason) == (expected.versions, expected.finish_reason)


async def test_over_an_interruption(tiny, other, serve, ask, share, truth):
    request, collected = ask(1, max_tokens=40), Collected()
    async with serve(tiny) as served:
        answer = await served.under_way(request, collected.add, num_steps=8)
        await served.interrupt(PauseMode.RETRACT, share(other), WeightVersion(step=8))
        result = await answer
    collected.assert_make(result)
    old, new = (Weights(model=model, version=WeightVersion(step=step)) for model, step in ((tiny, 7), (other, 8)))
    assert_swapped(old, new, request, result, truth)


async def test_tokens_leave_as_they_are_sampled(tiny, serve, ask):
    collected = Collected()
    async with serve(tiny) as served:
        served.gate.shut()
        answer = asyncio.create_task(served.engine.generate(ask(1, max_tokens=30), collected.add))
        await collected.until(1)
        await served.gate.steps(3)
        await collected.until(3)
        assert not answer.done()
        served.gate.open()
        collected.assert_make(await answer)
    assert len(collected.chunks) > 1


async def test_a_stop_token_ends_a_stream(tiny, serve, ask):
    collected = Collected()
    async with serve(tiny) as served:
        free = await served.engine.generate(ask(7, max_tokens=30))
        request = ask(7, max_tokens=30, stop_token_ids=(free.token_ids[9],))
        result = await served.engine.generate(request, collected.add)
    collected.assert_make(result)
    assert result.finish_reason is FinishReason.STOP


async def test_an_abort_ends_a_stream_with_what_there_is(tiny, serve, ask, truth):
    request, collected = ask(1, max_tokens=400), Collected()
    async with serve(tiny) as served:
        answer = await served.under_way(request, collected.add, num_steps=6)
        await served.gate.meanwhile(served.engine.abort(request.request_id))
        result = await answer
    collected.assert_make(result)
    assert result.finish_reason is FinishReason.ABORT
    assert 6 <= len(result.token_ids) < 400


async def test_an_abort_before_the_first_token(tiny, serve, ask):
    collected = Collected()
    async with serve(tiny) as served:
        answer = await served.queued(ask(1), collected.add)
        await served.engine.abort(ask(1).request_id)
        result = await answer
    assert (result.finish_reason, result.token_ids, collected.chunks) == (FinishReason.ABORT, (), [])


async def test_cancelling_frees_the_slot(tiny, serve, ask):
    collected = Collected()
    async with serve(tiny) as served:
        answer = await served.under_way(ask(1, max_tokens=400), collected.add, num_steps=1)
        await collected.until(1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await served.gate.meanwhile(served.until(lambda stats: stats.num_running == 0))
        assert (await served.engine.stats()).generated_tokens < 400


async def test_hanging_up_frees_the_slot_and_is_no_failure(tiny, serve, ask, caplog):
    body = generate.encode_request(ask(1, max_tokens=400), is_streamed=True)
    async with serve(tiny) as served, aiohttp.ClientSession() as session:
        served.gate.shut()
        async with session.post(served.engine.base_url + generate.GENERATE, json=body) as response:
            assert (await response.content.readany()).startswith(b"data: {")
        await served.gate.meanwhile(served.until(lambda stats: stats.num_running == 0))
        assert (await served.engine.stats()).generated_tokens < 400
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_what_is_refused_is_refused_before_the_stream(tiny, serve, ask):
    async with serve(tiny) as served:
        first = await served.queued(ask(1), Collected().add)
        with pytest.raises(EngineRejected, match=r"400: .*in flight already"):
            await served.engine.generate(ask(1), Collected().add)
        await served.engine.resume()
        assert len((await first).token_ids) == 12


async def test_a_model_thread_that_dies_in_mid_stream(tiny, serve, ask):
    collected = Collected()
    async with serve(tiny) as served:
        answer = await served.under_way(ask(1, max_tokens=400), collected.add, num_steps=1)
        await collected.until(1)
        served.gate.breaks_with = RuntimeError("out of memory")
        served.gate.open()
        with pytest.raises(EngineUnreachable, match=r"broke off with 503: .*out of memory"):
            await answer
