"""New weights for a fleet:

- all take them; one that fails at any step is quarantined with the reason, the others serve them, and it catches up
- if all fail nobody is quarantined, and the old version serves everywhere
- a label that does not change is a failure; a server that missed a version samples nothing meanwhile
- if no server is left at any step the push is repeated once one serves, up to three times
- a push waits while nobody serves; nobody joins during one; a server that hangs in it does not hold up the others
- the next push begins after one whose sender vanished; a push that is not open is a conflict
- a pause that aborts returns what there is; requests of a server that fails in a push move, and go on after it
"""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent.engine.fake import Operation
from areal_agent.engine.fleet.member import MemberState
from areal_agent.errors import EnginesGone, EngineUnreachable, PushConflict, WeightUpdateError
from areal_agent.types import DiskWeights, FinishReason, PauseMode, WeightVersion
from areal_agent.weights.push import MAX_ATTEMPTS, push, push_under

from .conftest import NEW, OLD, PATIENT, URLS, Server, Stage, ask, tokens

MODEL, WEIGHTS = Path("model"), DiskWeights(path="weights-8")
STEPS = [Operation.BEGIN_PUSH, Operation.SEND_PUSH, Operation.PAUSE, Operation.COMMIT_PUSH, Operation.RESUME]
FAILURES = [EngineUnreachable("no answer"), WeightUpdateError("will not")]


async def versions(stage: Stage) -> list[WeightVersion]:
    return [server.fake.version for server in stage.servers.values()]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", STEPS)
async def test_one_that_fails_is_quarantined_and_follows(stage, caplog, step, failure):
    stage.one.fake.fail_next(step, failure)
    await push([stage.fleet], WEIGHTS, NEW)
    assert stage.two.fake.version == NEW
    await stage.until_serving(stage.one)
    assert await versions(stage) == [NEW, NEW]
    assert (stage.one.fake.paused, stage.two.fake.paused) == (None, None)
    assert any("http://one is quarantined" in record.message for record in caplog.records)


async def test_a_label_that_does_not_move(stage):
    stage.one.moves_label = False
    await push([stage.fleet], WEIGHTS, NEW)
    await stage.until(lambda: "reports that it serves 0:7 after a push of 0:8" in stage.report(stage.one).reason)
    stage.one.moves_label = True
    await stage.until_serving(stage.one)
    assert await versions(stage) == [NEW, NEW]


@pytest.mark.parametrize("step", STEPS[1:4:2])
async def test_where_all_fail_the_old_version_serves(stage, step):
    for server in stage.servers.values():
        server.fake.fail_next(step, WeightUpdateError("the weights are damaged"))
    with pytest.raises(WeightUpdateError, match=r"at every server: http://one: the weights are.*http://two: "):
        await push([stage.fleet], WEIGHTS, NEW)
    assert await versions(stage) == [OLD, OLD]
    assert [one.state for one in stage.fleet.report()] == [MemberState.SERVING] * 2
    assert [server.fake.paused for server in stage.servers.values()] == [None, None]
    answer = stage.start(ask())
    await stage.until(lambda: bool(stage.one.fake.step(100) + stage.two.fake.step(100)))
    assert (await answer).token_ids == tokens(ask(), 8)


async def push_again(stage: Stage) -> None:
    """Push new weights, as a run does."""
    await push_under("interrupt", [stage.fleet], WEIGHTS, NEW, drained=contextlib.nullcontext)


@pytest.mark.parametrize("step", STEPS)
async def test_where_nobody_is_left_it_is_made_again(open_stage, step):
    async with open_stage(Server(URLS[0])) as stage:
        stage.fleet.pushes.begin_with(MODEL, OLD)
        stage.one.fake.fail_next(step, EngineUnreachable("no answer"))
        await push_again(stage)
        await stage.until_serving(stage.one)
        assert (stage.one.fake.version, stage.one.fake.paused) == (NEW, None)


async def test_where_nobody_is_left_three_times_it_fails(open_stage):
    async with open_stage(Server(URLS[0])) as stage:
        stage.fleet.pushes.begin_with(MODEL, OLD)
        for _ in range(MAX_ATTEMPTS):
            stage.one.fake.fail_next(Operation.SEND_PUSH, EngineUnreachable("no answer"))
        with pytest.raises(EnginesGone, match="send failed at every server: http://one: no answer"):
            await push_again(stage)
        await stage.until_serving(stage.one)
        assert (stage.one.fake.version, stage.one.fake.paused) == (OLD, None)
        await push_again(stage)
        assert stage.one.fake.version == NEW


async def test_who_missed_a_version_does_not_sample(stage):
    """Hold up the server that catches up: requests go elsewhere meanwhile, to the last one."""
    for _ in range(10_000):
        stage.one.fake.fail_next(Operation.COMMIT_PUSH, WeightUpdateError("will not"))
    moving = [stage.start(ask(number)) for number in range(4)]
    await stage.until(lambda: stage.one.fake.num_in_flight == stage.two.fake.num_in_flight == 2)
    await push([stage.fleet], WEIGHTS, NEW)
    later = [stage.start(ask(10 + number)) for number in range(4)]
    await stage.until(lambda: stage.two.fake.num_in_flight == 8)
    assert (stage.one.fake.num_in_flight, stage.one.fake.version) == (0, OLD)
    stage.two.fake.step(100)
    results = await asyncio.gather(*moving, *later)
    assert {span.version for result in results for span in result.versions} == {NEW}


async def test_with_nobody_serving_a_push_waits(stage):
    stage.fleet.pushes.begin_with(DiskWeights, OLD)  # type: ignore[arg-type]
    await stage.kill_all()
    pushing = asyncio.ensure_future(push([stage.fleet], WEIGHTS, NEW))
    await asyncio.sleep(0)
    stage.one.restart(OLD)
    await pushing
    assert stage.one.fake.version == NEW
    stage.two.restart(OLD)
    await stage.until_serving(stage.two)
    assert stage.two.fake.version == NEW


async def test_nobody_for_too_long_is_a_failed_push(open_stage):
    async with open_stage(*map(Server, URLS), patience=replace(PATIENT, wait_s=0.02)) as stage:
        await stage.fleet.info()
        await stage.kill_all()
        with pytest.raises(WeightUpdateError, match="no server has served"):
            await push([stage.fleet], WEIGHTS, NEW)


async def test_nobody_joins_while_a_push_is_open(stage):
    stage.one.kill()
    await stage.until(lambda: stage.state(stage.one) is not MemberState.SERVING)
    await stage.fleet.begin_push("p")
    stage.one.restart(OLD)
    num_infos = stage.two.num_infos
    await stage.fleet.send_push("p", WEIGHTS)
    await stage.until(lambda: stage.two.num_infos > num_infos + 3)
    assert stage.state(stage.one) is not MemberState.SERVING
    await stage.fleet.pause(PauseMode.RETRACT)
    await stage.fleet.commit_push("p", NEW)
    await stage.fleet.resume()
    await stage.until_serving(stage.one)
    assert stage.one.fake.version == NEW


async def test_one_that_hangs_in_a_push_does_not_hold_up_the_others(open_stage):
    patience = replace(PATIENT, hung_after_s=0.5, probe_timeout_s=0.2)
    async with open_stage(*map(Server, URLS), patience=patience) as stage:
        await stage.fleet.info()
        stage.one.answers.clear()
        stage.one.fake.hang_next(Operation.SEND_PUSH)
        await push([stage.fleet], WEIGHTS, NEW)
        assert stage.two.fake.version == NEW
        stage.one.fake.recover()
        stage.one.answers.set()
        await stage.until_serving(stage.one)
        assert stage.one.fake.version == NEW


async def test_a_push_after_one_whose_sender_vanished(stage):
    await stage.fleet.begin_push("lost")
    await stage.fleet.send_push("lost", WEIGHTS)
    for server in stage.servers.values():
        server.fake._pushes.abort("lost")  # as after its time-out
    await push([stage.fleet], WEIGHTS, NEW)
    assert await versions(stage) == [NEW, NEW]


async def test_a_push_that_is_not_open_is_a_conflict(stage):
    with pytest.raises(PushConflict):
        await stage.fleet.send_push("p", WEIGHTS)
    await stage.fleet.begin_push("p")
    with pytest.raises(PushConflict, match="sent no weights"):
        await stage.fleet.commit_push("p", NEW)
    await stage.fleet.abort_push("another")
    await stage.fleet.abort_push("p")
    with pytest.raises(PushConflict):
        await stage.fleet.commit_push("p", NEW)


async def test_a_pause_that_aborts_gives_what_there_is(stage):
    answer, *_ = await stage.under_way()
    await stage.fleet.pause(PauseMode.ABORT)
    assert ((await answer).token_ids, (await answer).finish_reason) == (tokens(ask(), 3), FinishReason.ABORT)
    await stage.fleet.resume()


async def test_requests_of_one_that_falls_in_a_push_go_on_after_it(stage):
    answer, *_ = await stage.under_way()
    stage.one.fake.fail_next(Operation.COMMIT_PUSH, WeightUpdateError("will not"))
    await push([stage.fleet], WEIGHTS, NEW)
    await stage.until(lambda: bool(stage.one.fake.step(100) + stage.two.fake.step(100)))
    result = await answer
    assert result.token_ids == tokens(ask(), 8)
    assert [(span.version, span.start, span.end) for span in result.versions] == [(OLD, 0, 3), (NEW, 3, 8)]
