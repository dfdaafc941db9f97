"""The memory of keys and values, released and taken back:

- a release gives it back to the machine
- requests under way wait and lose nothing: tokens and log-probabilities are the same; new ones wait
- they go on under weights that come meanwhile
- an abort answers at once with what was sampled
- releasing twice is harmless; so is resuming what was not released, which keeps the prefix cache
- without enough memory, resuming is refused, the engine lives, and it may be tried again
- only keys and values can be released, not weights
"""

import asyncio
import os
import sys
from pathlib import Path

import orjson
import pytest
import torch

from areal_agent.engine.embedded.kv_cache import KVCache, KVShape
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.wire import control
from areal_agent.engine.wire.fields import WireError
from areal_agent.errors import EngineRejected
from areal_agent.types import FinishReason, VersionSpan, WeightVersion
from tests.engine.conftest import DEADLINE_S, MAX_CONTEXT, Wrapped, both_ways

fixed_shapes = both_ways

OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)
TOLERANCE = 1e-4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_release_gives_the_memory_back():
    shape = KVShape(num_layers=4, num_kv_heads=8, head_dim=64)
    cache = KVCache(shape, num_slots=4, num_positions=2048, device=torch.device("cpu"), dtype=torch.float32)
    ones = torch.ones(8, 2048, 64)
    for slot in range(4):
        for layer in range(4):
            cache.write(layer, slot, 0, ones, ones)
    num_bytes = 4 * 2048 * shape.num_bytes(torch.float32)
    before = resident_bytes()
    cache.free()
    assert before - resident_bytes() > num_bytes / 2
    cache.allocate()
    assert not cache.copy_out(3, 0, 2048).any()


async def test_requests_wait_and_lose_nothing(tiny, served, ask, truth):
    request, late = ask(1, max_tokens=40), ask(2)
    answer = await served.under_way(request)
    await served.gate.meanwhile(served.engine.release_memory())
    served.gate.open()
    second = asyncio.create_task(served.engine.generate(late))
    await served.until(lambda stats: stats.num_queued == 2)
    assert (await served.engine.stats()).num_running == 0
    assert not answer.done() and not second.done()
    await served.engine.resume_memory()
    result, _ = await answer, await second
    undisturbed = await served.engine.generate(request)
    assert result.token_ids == undisturbed.token_ids
    assert result.versions == (VersionSpan(version=OLD, start=0, end=40),)
    truth(tiny).check(request, result)


async def test_they_go_on_under_the_weights_that_came_meanwhile(other, served, ask, truth, share):
    request = ask(1, max_tokens=40)
    answer = await served.under_way(request)
    await served.gate.meanwhile(served.engine.release_memory())
    served.gate.open()
    await served.engine.update_weights(share(other), NEW)
    await served.engine.resume_memory()
    result = await answer
    split = result.versions[0].end
    assert [span.version for span in result.versions] == [OLD, NEW]
    new = truth(other).logprobs(request.input_ids, result.token_ids)
    assert result.logprobs[split:] == pytest.approx(new[split:], abs=TOLERANCE)


async def test_an_abort_meanwhile_answers_with_what_was_sampled(served, ask):
    answer = await served.under_way(ask(1, max_tokens=40))
    await served.gate.meanwhile(served.engine.release_memory())
    served.gate.open()
    await served.engine.abort(ask(1).request_id)
    result = await answer
    await served.engine.resume_memory()
    assert len((await served.engine.generate(ask(2))).token_ids) == 12
    assert result.finish_reason is FinishReason.ABORT and 5 <= len(result.token_ids) < 40


async def test_releasing_and_resuming_twice_is_harmless(served, ask):
    first = await served.engine.generate(ask(1, prompt_length=100))
    await served.engine.resume_memory()
    again = await served.engine.generate(ask(1, prompt_length=100))
    assert (first.cached_tokens, again.cached_tokens) == (0, 99)
    await served.engine.release_memory()
    await served.engine.release_memory()
    await served.engine.resume_memory()
    await served.engine.resume_memory()
    last = await served.engine.generate(ask(1, prompt_length=100))
    assert last.cached_tokens == 0 and last.token_ids == first.token_ids


class Short(Wrapped):
    """Its memory is taken by somebody else at first."""

    is_taken = True

    def resume_memory(self) -> None:
        if self.is_taken:
            raise EngineRejected("there is no memory")
        self._runner.resume_memory()


def test_where_the_memory_is_not_there_it_may_be_tried_again(tiny, schedule, ask):
    with schedule(tiny, Short) as (scheduler, runner):
        scheduler.release_memory()
        answer = scheduler.submit(ask(1))
        with pytest.raises(EngineRejected, match="no memory"):
            scheduler.resume_memory().result(DEADLINE_S)
        assert not scheduler.is_closed and not answer.done()
        runner.is_taken = False
        scheduler.resume_memory()
        assert len(answer.result(DEADLINE_S).token_ids) == 12


def test_memory_that_is_not_there_is_refused_in_words(tiny, monkeypatch):
    runner = ModelRunner(str(tiny), device="cpu", num_slots=2, max_context_tokens=MAX_CONTEXT)
    runner.release_memory()

    def short() -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(runner.kv.cache, "allocate", short)
    with pytest.raises(EngineRejected, match=r"keys and values of 2048 tokens in the slots of 2 requests: .* 20 GiB"):
        runner.resume_memory()


def test_keys_and_values_alone_are_released():
    assert control.Memory.read(b"") == control.Memory.read(b'{"tags": ["kv_cache"]}')
    for tags in (["weights"], ["kv_cache", "weights"], [], "kv_cache"):
        with pytest.raises(WireError, match="tags"):
            control.Memory.read(orjson.dumps({"tags": tags}))
