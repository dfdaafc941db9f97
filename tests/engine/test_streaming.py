"""The embedded engine streams:

- the joined chunks are the result, which equals that of the same request without streaming; test_interruption.py has
  swaps, sglang/test_contract.py ends and aborts, test_abort.py clients that leave, test_requests.py refusals
- tokens leave before the completion has ended
- a model thread that dies in mid-stream is EngineUnreachable
"""

import asyncio
import dataclasses

import pytest

from areal_agent.errors import EngineUnreachable
from areal_agent.types import TokenChunk

from .sglang.conftest import Watched


@pytest.mark.parametrize("number", [0, 3])
async def test_streamed_is_not_streamed(number, tiny, serve, ask):
    asked = [ask(i, prompt_length=4 + i, max_tokens=1 + 9 * i) for i in range(6)]
    requests = [dataclasses.replace(one, num_top_logprobs=number) for one in asked]
    chunks: list[list[TokenChunk]] = [[] for _ in requests]
    async with serve(tiny, num_slots=4) as served:
        pairs = zip(requests, chunks, strict=True)
        streamed = await asyncio.gather(*(served.engine.generate(request, told.append) for request, told in pairs))
        whole = [await served.engine.generate(request) for request in requests]
    for told, result, expected in zip(chunks, streamed, whole, strict=True):
        for name in ("token_ids", "logprobs", "top_logprobs"):
            assert tuple(one for chunk in told for one in getattr(chunk, name)) == getattr(result, name)
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert (result.versions, result.finish_reason) == (expected.versions, expected.finish_reason)


async def test_tokens_leave_as_they_are_sampled(served, ask):
    served.gate.shut()
    watched = Watched(served.engine, ask(1, max_tokens=30))
    await watched.until(1)
    await served.gate.steps(3)
    await watched.until(3)
    assert len(watched.token_ids) < 30
    served.gate.open()
    result = await watched.answer
    assert tuple(watched.token_ids) == result.token_ids


async def test_a_model_thread_that_dies_in_mid_stream(served, ask):
    served.gate.shut()
    watched = Watched(served.engine, ask(1, max_tokens=400))
    await watched.until(1)
    await served.gate.steps(1)
    served.gate.breaks_with = RuntimeError("out of memory")
    served.gate.open()
    with pytest.raises(EngineUnreachable, match=r"broke off with 503: .*out of memory"):
        await watched.answer
