"""Interruption and weight swaps, over HTTP, at a token boundary in the middle of a completion:

- retract: tokens before the swap are the old model's, later ones the new model's over prompt and sampled tokens; spans
  say which; by shared memory and from disk; streamed, with more requests than slots
- in place: the completion goes on with its old KV; the spans still give the versions
- abort (test_given_up.py): requests under way return what they have; new ones wait during the pause
- wait: what has begun ends on the old version first, and nothing begins
- an update without a pause recomputes; no request is lost; new requests run on the new version only
- a pause holds requests back; test_requests.py pauses and resumes twice
"""

import asyncio

import orjson
import pytest

from areal_agent.engine.wire import control
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DiskWeights, PauseMode, TokenChunk, VersionSpan, WeightVersion
from tests.engine.conftest import both_ways

from .sampled import Weights, assert_sampled_by, assert_swapped

fixed_shapes = both_ways

TOLERANCE = 1e-4
OLD, NEW = WeightVersion(step=7), WeightVersion(step=8)


def spans(*ends: int) -> tuple[VersionSpan, ...]:
    """The spans of versions 7, 8, ... with these ends."""
    starts = [0, *ends[:-1]]
    return tuple(
        VersionSpan(version=WeightVersion(step=7 + i), start=start, end=end)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


@pytest.fixture(params=["shared_memory", "disk"])
def new_weights(request, other, share):
    return share(other) if request.param == "shared_memory" else DiskWeights(path=str(other))


async def test_retract_goes_on_under_the_new_weights(tiny, other, serve, ask, truth, new_weights):
    """Twelve requests for four slots: those that have begun are swapped, the others begin with the new weights."""
    requests = [ask(i, prompt_length=4 + i, max_tokens=20 + i) for i in range(12)]
    chunks: list[list[TokenChunk]] = [[] for _ in requests]
    async with serve(tiny, num_slots=4) as served:
        served.gate.shut()
        pairs = zip(requests, chunks, strict=True)
        answers = [asyncio.create_task(served.engine.generate(request, told.append)) for request, told in pairs]
        await served.gate.steps(10)
        await served.interrupt(PauseMode.RETRACT, new_weights, NEW)
        results = await asyncio.gather(*answers)
    old, new = Weights(model=tiny, version=OLD), Weights(model=other, version=NEW)
    has_begun = [result.versions[0].version == OLD for result in results]
    assert sum(has_begun) == 4
    for request, result, told, is_swapped in zip(requests, results, chunks, has_begun, strict=True):
        assert tuple(id_ for chunk in told for id_ in chunk.token_ids) == result.token_ids
        if is_swapped:
            assert_swapped(old, new, request, result, truth)
        else:
            assert_sampled_by(new, request, result, truth)


async def test_an_update_without_a_pause_recomputes(other, served, ask, truth, new_weights):
    request = ask(1, max_tokens=200)
    answer = await served.under_way(request)
    await served.gate.meanwhile(served.engine.update_weights(new_weights, NEW))
    served.gate.open()
    result = await answer
    split = result.versions[0].end
    assert result.versions == spans(split, 200)
    new = truth(other).logprobs(request.input_ids, result.token_ids)
    assert result.logprobs[split:] == pytest.approx(new[split:], abs=TOLERANCE)


async def test_two_swaps_three_spans(tiny, other, served, ask, share):
    served.gate.shut()
    answer = asyncio.create_task(served.engine.generate(ask(1, max_tokens=300)))
    for step, folder in ((8, other), (9, tiny)):
        await served.gate.steps(4)
        await served.gate.meanwhile(served.engine.update_weights(share(folder), WeightVersion(step=step)))
    served.gate.open()
    result = await answer
    assert result.versions == spans(result.versions[0].end, result.versions[1].end, 300)


async def test_in_place_keeps_the_old_keys_and_values(other, served, ask, truth, share):
    request = ask(1, max_tokens=60)
    answer = await served.under_way(request, num_steps=12)
    await served.interrupt(PauseMode.IN_PLACE, share(other), NEW)
    result = await answer
    split = result.versions[0].end
    assert result.versions == spans(split, 60)
    new = truth(other).logprobs(request.input_ids, result.token_ids)
    assert result.logprobs[split:] != pytest.approx(new[split:], abs=0.05)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_pause_without_a_swap_changes_nothing(mode, served, ask):
    request = ask(1, max_tokens=40)
    answer = await served.under_way(request)
    await served.interrupt(mode)
    result, undisturbed = await answer, await served.engine.generate(request)
    assert (result.token_ids, result.versions) == (undisturbed.token_ids, spans(40))
    assert result.logprobs == pytest.approx(undisturbed.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("is_retracted", [False, True])
async def test_wait_lets_answers_end_and_none_begin(is_retracted, tiny, schedule, ask):
    with schedule(tiny) as (scheduler, gate):
        gate.shut()
        begun = scheduler.submit(ask(1, max_tokens=40))
        await gate.steps(5)
        if is_retracted:
            scheduler.pause(PauseMode.RETRACT)
        pause = scheduler.pause(PauseMode.WAIT)
        late = scheduler.submit(ask(2))
        gate.open()
        await asyncio.wrap_future(pause)
        assert begun.result().versions == spans(40)
        assert scheduler.stats().num_queued == 1 and not late.done()
        scheduler.resume()
        assert (await asyncio.wrap_future(late)).versions == spans(12)


@pytest.mark.parametrize("ends_by", ["abort", "resume", "nothing to wait for"])
async def test_wait_is_over_when_there_is_nothing_to_wait_for(ends_by, tiny, schedule, ask):
    with schedule(tiny) as (scheduler, gate):
        gate.shut()
        if ends_by != "nothing to wait for":
            scheduler.submit(ask(1, max_tokens=400))
            await gate.steps(5)
        pause = scheduler.pause(PauseMode.WAIT)
        if ends_by == "abort":
            scheduler.abort(None)
        elif ends_by == "resume":
            scheduler.resume()
        gate.open()
        await asyncio.wrap_future(pause)


@pytest.mark.parametrize("mode", PauseMode)
async def test_requests_that_arrive_while_paused_wait_and_run_on_the_new_version(mode, other, served, ask, share):
    answer = await served.queued(ask(1), mode=mode)
    await served.engine.update_weights(share(other), NEW)
    assert (await served.engine.stats()).generated_tokens == 0
    await served.engine.resume()
    result = await answer
    assert result.versions == (VersionSpan(version=NEW, start=0, end=12),)


async def test_a_failed_update_while_paused_lets_the_old_version_go_on(tiny, served, ask, truth):
    request = ask(1, max_tokens=40)
    answer = await served.under_way(request)
    await served.gate.meanwhile(served.engine.pause(PauseMode.RETRACT))
    with pytest.raises(WeightUpdateError, match="no_such_folder"):
        await served.engine.update_weights(DiskWeights(path="no_such_folder"), NEW)
    served.gate.open()
    await served.engine.resume()
    result = await answer
    assert result.versions == spans(40)
    truth(tiny).check(request, result)


@pytest.mark.parametrize("push_id", [None, "p"])
def test_the_wire_carries_every_mode(push_id):
    pauses = [control.Pause(mode=mode, push_id=push_id) for mode in PauseMode]
    assert [control.Pause.read(orjson.dumps(pause.encode())) for pause in pauses] == pauses
    assert control.Continue.read(orjson.dumps(control.Continue(push_id=push_id).encode())).push_id == push_id
