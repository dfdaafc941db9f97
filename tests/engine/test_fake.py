"""FakeEngine keeps the promises of `protocols.Engine` and follows its script. The tests of fleets, which rely on it,
show replies by function, aborts, cancelled and hanging calls; those of pushes show damaged ones.

- replies in order; stop, length and end of the script; scripted errors
- a stepped completion is interrupted between any two tokens and says which version sampled what
- chunks as tokens are sampled, one token each unless stepped; scripted likeliest tokens; a grammar if configured
- pauses hold requests back
- faults, once each: dying in mid-turn, garbage in an answer; those that have not happened yet are told
- plans and replies that cannot be carried out are refused
- on a virtual clock, tokens come on time
"""

import asyncio
import dataclasses

import pytest

from areal_agent.engine.fake import FakeEngine, Garbage, Operation, VirtualClock, fake_logprob, fake_top_logprobs
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import DiskWeights, FinishReason, PauseMode, TokenChunk, VersionSpan, WeightVersion

NEW = WeightVersion(step=8)


async def test_answers_in_the_order_of_the_script(ask):
    engine = FakeEngine([[11, 12], [13]])
    first, second = await engine.generate(ask(1)), await engine.generate(ask(2))
    assert (first.token_ids, second.token_ids) == ((11, 12), (13,))
    assert first.logprobs == (fake_logprob(11, 0), fake_logprob(12, 1))
    assert first.finish_reason is FinishReason.STOP
    assert [request.request_id for request in engine.requests] == [ask(1).request_id, ask(2).request_id]


async def test_max_tokens_and_stop_tokens_end_a_reply(ask):
    engine = FakeEngine([[1, 2, 3, 4], [1, 2, 3, 4]])
    cut = await engine.generate(ask(1, max_tokens=3))
    stopped = await engine.generate(ask(2, stop_token_ids=(2,)))
    assert (cut.token_ids, cut.finish_reason) == ((1, 2, 3), FinishReason.LENGTH)
    assert (stopped.token_ids, stopped.finish_reason) == ((1, 2), FinishReason.STOP)


async def test_no_stop_token_is_sampled_before_min_tokens(ask):
    answer = await FakeEngine([[2, 1, 2, 3, 2, 4]]).generate(ask(1, min_tokens=2, stop_token_ids=(2,)))
    assert (answer.token_ids, answer.finish_reason) == ((1, 3, 2), FinishReason.STOP)


async def test_a_script_that_is_too_short_says_so(ask):
    with pytest.raises(EngineError, match="0 replies"):
        await FakeEngine([]).generate(ask(1))


async def test_scripted_errors_are_raised_once(ask):
    engine = FakeEngine([EngineUnreachable("gone"), [5]])
    engine.fail_next(Operation.UPDATE_WEIGHTS, WeightUpdateError("no"))
    with pytest.raises(EngineUnreachable):
        await engine.generate(ask(1))
    assert (await engine.generate(ask(2))).token_ids == (5,)
    with pytest.raises(WeightUpdateError):
        await engine.update_weights(DiskWeights(path="w"), NEW)
    await engine.update_weights(DiskWeights(path="w"), NEW)
    assert engine.version == NEW


async def test_what_a_real_engine_rejects_is_rejected(ask):
    with pytest.raises(EngineRejected, match="context"):
        await FakeEngine([[1]], max_context_tokens=20).generate(ask(1, prompt_length=15))


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_swap_between_two_tokens(mode, ask):
    engine = FakeEngine([[11, 12, 13, 14], [15]], version=WeightVersion(step=7), is_stepped=True)
    answer = asyncio.create_task(engine.generate(ask(1)))
    await engine.wait_for_requests(1)
    assert engine.step(2) == 2
    await engine.pause(mode)
    late = asyncio.create_task(engine.generate(ask(2)))  # held back
    await engine.wait_for_requests(2)
    assert engine.step() == 0
    await engine.update_weights(DiskWeights(path="new"), NEW)
    await engine.resume()
    engine.step(9)
    result = await answer
    assert (await late).versions == (VersionSpan(version=NEW, start=0, end=1),)
    assert result.versions == (
        VersionSpan(version=WeightVersion(step=7), start=0, end=2),
        VersionSpan(version=NEW, start=2, end=4),
    )


async def test_a_stepped_stream_has_one_chunk_a_step(ask):
    engine, chunks = FakeEngine([[11, 12, 13]], is_stepped=True), []
    answer = asyncio.create_task(engine.generate(ask(1), chunks.append))
    await engine.wait_for_requests(1)
    engine.step(2)
    assert [chunk.token_ids for chunk in chunks] == [(11, 12)]
    engine.step(2)
    await answer
    assert [chunk.token_ids for chunk in chunks] == [(11, 12), (13,)]


async def test_the_likeliest_tokens_are_scripted(ask):
    chunks: list[TokenChunk] = []
    request = dataclasses.replace(ask(1), num_top_logprobs=2)
    result = await FakeEngine([[11, 0]]).generate(request, chunks.append)
    assert result.top_logprobs == (fake_top_logprobs(11, 0, 2), fake_top_logprobs(0, 1, 2))
    assert tuple(top for chunk in chunks for top in chunk.top_logprobs) == result.top_logprobs
    assert [(chunk.token_ids, chunk.logprobs) for chunk in chunks] == [
        ((11,), result.logprobs[:1]),
        ((0,), result.logprobs[1:]),
    ]


async def test_a_grammar_only_when_told(ask):
    request = ask(1, json_schema="{}")
    with pytest.raises(EngineRejected, match="json_schema"):
        await FakeEngine([[11]]).generate(request)
    assert (await FakeEngine([[11]], has_grammar=True).generate(request)).token_ids == (11,)


async def test_a_pause_that_waits_lets_requests_end_and_none_begin(ask):
    engine = FakeEngine([[11, 12], [13]], is_stepped=True)
    first = asyncio.create_task(engine.generate(ask(1)))
    await engine.wait_for_requests(1)
    engine.step()
    pause = asyncio.create_task(engine.pause(PauseMode.WAIT))
    second = asyncio.create_task(engine.generate(ask(2)))
    await engine.wait_for_requests(2)
    assert not pause.done()
    engine.step()
    await pause
    assert (await first).token_ids == (11, 12)
    assert engine.step() == 0
    await engine.resume()
    engine.step()
    assert (await second).token_ids == (13,)


async def test_it_dies_in_the_middle_of_a_turn_and_recovers(ask):
    engine, chunks = FakeEngine([[11, 12, 13], [14]]), []
    engine.die_after(2)
    with pytest.raises(EngineUnreachable, match="died"):
        await engine.generate(ask(1), chunks.append)
    assert [chunk.token_ids for chunk in chunks] == [(11,), (12,)]
    for call in (engine.pause(PauseMode.RETRACT), engine.resume(), engine.abort("x"), engine.generate(ask(2))):
        with pytest.raises(EngineUnreachable):
            await call
    engine.recover()
    assert (await engine.generate(ask(2))).token_ids == (14,)


@pytest.mark.parametrize("garbage", Garbage)
async def test_garbage_breaks_one_promise_once(garbage, ask):
    engine = FakeEngine(lambda _: [11, 12], vocab_size=100)
    whole = await engine.generate(ask(1))
    engine.garble_next(garbage)
    broken = await engine.generate(ask(2))
    changed = {f.name for f in dataclasses.fields(whole) if getattr(whole, f.name) != getattr(broken, f.name)}
    assert len(changed) == 1
    assert await engine.generate(ask(3)) == whole


async def test_faults_that_have_not_happened_are_told(ask):
    engine = FakeEngine([[], [11]], vocab_size=100)
    engine.garble_next(Garbage.ID_OUTSIDE)
    engine.fail_next(Operation.PAUSE, EngineError("planned"))
    engine.hang_next(Operation.ABORT)
    engine.corrupt_next_push()
    engine.die_after(3)
    assert (await engine.generate(ask(1))).token_ids == ()
    calls = ["fail_next(pause)", "hang_next(abort)"]
    assert engine.planned == [*calls, "die_after(3)", "garble_next(id_outside)", "corrupt_next_push()"]
    assert (await engine.generate(ask(2))).token_ids == (100,)
    assert engine.planned == [*calls, "die_after(2)", "corrupt_next_push()"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (lambda engine: engine.fail_next("generat", EngineError("x")), "'generat' is no Operation; give one of gen"),
        (lambda engine: engine.fail_next(Operation.GENERATE, "boom"), "'boom' is no exception that generate"),
        (lambda engine: engine.hang_next("pauses"), "'pauses' is no Operation"),
        (lambda engine: engine.garble_next("nothing"), "'nothing' is no Garbage; give one of id_outside"),
        (lambda engine: engine.die_after(-1), "num_tokens is -1; give a whole number"),
        (lambda engine: engine.die_after(1.5), "num_tokens is 1.5; give a whole number"),
        (lambda engine: VirtualClock().advance(-1.0), "duration_s is -1.0, and this clock never goes back"),
        (lambda engine: VirtualClock().call_later(float("nan"), print), "delay_s is nan, and this clock"),
        (lambda engine: FakeEngine(iter([[1]])), "the script is <list_iterator object"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(plan, said):
    with pytest.raises(ValueError, match=said):
        plan(FakeEngine([[1]]))


@pytest.mark.parametrize("reply", ["ab", ["ab"], 5, None, [1.5], [-1], [100]])
async def test_a_reply_that_is_none_says_so(ask, reply):
    with pytest.raises(EngineError, match="a reply of the script"):
        await FakeEngine([reply], vocab_size=100).generate(ask(1))


async def test_on_a_virtual_clock_tokens_come_at_their_time(ask):
    clock = VirtualClock()
    engine = FakeEngine([[11, 12], [13, 14, 15]], clock=clock, token_s=0.5)
    first, second = (asyncio.create_task(engine.generate(ask(number))) for number in (1, 2))
    await engine.wait_for_requests(2)
    clock.advance(1.0)
    assert ((await first).token_ids, second.done()) == ((11, 12), False)
    await engine.pause(PauseMode.RETRACT)
    clock.advance(60.0)
    assert engine.num_in_flight == 1
    await engine.resume()
    clock.advance(0.5)
    assert (await second).token_ids == (13, 14, 15)
