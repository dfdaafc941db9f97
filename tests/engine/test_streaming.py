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
from areal_agent.types import GenerateRequest, GenerateResult, TokenChunk


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


async def test_tokens_leave_as_they_are_sampled(served, ask):
    collected = Collected()
    served.gate.shut()
    answer = asyncio.create_task(served.engine.generate(ask(1, max_tokens=30), collected.add))
    await collected.until(1)
    await served.gate.steps(3)
    await collected.until(3)
    assert not answer.done()
    served.gate.open()
    collected.assert_make(await answer)
    assert len(collected.chunks) > 1


async def test_a_model_thread_that_dies_in_mid_stream(served, ask):
    collected = Collected()
    answer = await served.under_way(ask(1, max_tokens=400), collected.add, num_steps=1)
    await collected.until(1)
    served.gate.breaks_with = RuntimeError("out of memory")
    served.gate.open()
    with pytest.raises(EngineUnreachable, match=r"broke off with 503: .*out of memory"):
        await answer
