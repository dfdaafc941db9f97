"""Servers that fail, and come back:

- one that is down is quarantined before a request fails there; the reason is logged once, and shown
- silence is no failure while tokens come, or below the limit; then it is a hang, and its requests move; time in which
  this process slept, or the server loads weights, does not count
- one that is known to be lost is not waited for
- a server that comes back is verified: with the current label it serves; otherwise it gets the weights first
- one that cannot get them, serves another model, or reports that it is not healthy, stays out, and the reason is shown
- in a process that does not push, no server is touched: one that stays behind is asked last
- a server is added once, and not within a push: verified, given the weights whatever it served, and only then used; a
  fault in it is an error
- a server is removed, and not within a push: its requests end there, or move; the last serving one stays; one that is
  just being added is not added
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent.engine.fleet.keeper import Keeper
from areal_agent.engine.fleet.member import Member, MemberState, Roster, Versions
from areal_agent.engine.fleet.pushes import FleetPushes
from areal_agent.errors import EngineRejected, EngineUnreachable, ServerRefused, WeightUpdateError
from areal_agent.types import DiskWeights, PauseMode, WeightVersion
from areal_agent.weights.push import push
from tests.gateway.online import Clock

from .conftest import NEW, OLD, PATIENT, URLS, Server, Stage, ask, tokens

MODEL = Path("model")
WEIGHTS = DiskWeights(path="weights-8")
ZERO = WeightVersion()


async def killed(stage: Stage, server: Server) -> str:
    """Kill a server; once it is quarantined, return the reason."""
    server.kill()
    await stage.until(lambda: stage.state(server) is not MemberState.SERVING)
    return stage.report(server).reason


async def test_one_that_is_down_is_quarantined_and_it_is_said_once(stage, caplog):
    assert "http://one is down" in await killed(stage, stage.one)
    num_infos = stage.one.num_infos
    await stage.until(lambda: stage.one.num_infos > num_infos + 3)
    assert [record.message for record in caplog.records if "quarantined" in record.message] == [
        "http://one is quarantined: http://one is down; servers that serve now: 1"
    ]
    stats = await stage.fleet.stats()
    assert (stats.num_serving, stats.num_out) == (1, 1)


@asynccontextmanager
async def silence() -> AsyncGenerator[tuple[Member, Server, Clock, Callable[[float], Awaitable[None]]]]:
    """A server that is silent from now on, its keeper, and a clock that passes one look per second."""
    server, clock = Server(URLS[0]), Clock()
    member = Member(engine=server, heard_s=0.0)
    patience = replace(PATIENT, hung_after_s=30.0, probe_timeout_s=0.001, probe_every_s=1.0)
    server.answers.clear()
    roster = Roster([member])
    pushes = FleetPushes(roster, Versions(1.0), patience)  # without a push
    keeper = asyncio.create_task(Keeper(member, roster, pushes, lambda *_: None, patience, clock).run())

    async def pass_to(end_s: float) -> None:
        while clock.now_s < end_s:
            clock.now_s += 1.0
            num_infos = server.num_infos
            while server.num_infos < num_infos + 2:  # one look at least, begun and ended
                member.looked_after.set()
                await asyncio.sleep(0.001)

    try:
        async with asyncio.timeout(120):
            yield member, server, clock, pass_to
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})


async def test_slow_is_told_from_hung():
    async with silence() as (member, server, _, pass_to):
        await pass_to(29.0)
        assert member.state is MemberState.SERVING  # silent, and not for long enough
        member.heard_s = 29.0  # a token came
        await pass_to(58.0)
        assert member.state is MemberState.SERVING
        await pass_to(60.0)
        assert "hangs: for 30 s" in member.reason or "does not answer" in member.reason
        assert member.state is not MemberState.SERVING
        server.answers.set()
        while member.state is not MemberState.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_who_was_silent_while_this_process_slept_does_not_hang():
    async with silence() as (member, _, clock, pass_to):
        await pass_to(10.0)
        clock.now_s += 1000.0
        await pass_to(1028.0)
        assert member.state is MemberState.SERVING
        await pass_to(1032.0)
        assert member.state is not MemberState.SERVING


HASTY = replace(PATIENT, hung_after_s=0.0, probe_timeout_s=0.01)  # two silent looks are a hang


@pytest.mark.parametrize("is_push", [False, True])
async def test_one_that_is_silent_as_it_loads_does_not_hang(open_stage, is_push):
    async with open_stage(*map(Server, URLS), patience=HASTY) as stage:
        await stage.fleet.begin_push("p")
        await stage.fleet.send_push("p", WEIGHTS)
        await stage.fleet.pause(PauseMode.RETRACT)
        stage.silence(stage.one)
        load = stage.fleet.commit_push("p", NEW) if is_push else stage.fleet.pushes.load(MODEL, OLD)
        loading = asyncio.ensure_future(load)
        await stage.looked_at(stage.one)
        assert stage.state(stage.one) is MemberState.SERVING
        stage.end_silence(stage.one)
        await loading
        await stage.fleet.resume()
        assert stage.state(stage.one) is MemberState.SERVING
        assert stage.one.loaded == ([] if is_push else [(MODEL, OLD)])


async def test_the_requests_of_one_that_hangs_move(open_stage):
    patience = replace(PATIENT, hung_after_s=0.5, probe_timeout_s=0.2)
    async with open_stage(*map(Server, URLS), patience=patience) as stage:
        answer = stage.start(ask())
        await stage.until(lambda: bool(stage.one.fake.num_in_flight))
        stage.one.fake.step(3)
        stage.one.answers.clear()
        await stage.two.finish()
        assert (await answer).token_ids == tokens(ask(), 8)
        assert stage.one.fake.aborted_ids  # the one that hangs was hung up on
        stage.one.answers.set()
        await stage.until_serving(stage.one)


async def test_the_requests_of_one_that_is_known_to_be_lost_move_at_once(stage):
    answer = stage.start(ask())
    await stage.until(lambda: bool(stage.one.fake.num_in_flight))
    stage.one.fake.step(3)
    stage.one.answers.clear()  # silent, and by its patience this fleet would wait for it
    stage.fleet.lose(stage.one.base_url, "its machine is lost")
    await stage.two.finish()
    assert (await answer).token_ids == tokens(ask(), 8)
    assert stage.state(stage.one) is not MemberState.SERVING


# --------------------------------------------------------------------------------------------- coming back


async def test_with_the_right_label_it_serves_again(stage):
    stage.fleet.pushes.begin_with(MODEL, OLD)
    await killed(stage, stage.one)
    stage.one.restart(OLD)
    await stage.until_serving(stage.one)
    assert (stage.one.loaded, stage.one.fake.weights) == ([], [])


async def test_before_the_first_push_it_is_given_the_model(stage):
    stage.fleet.pushes.begin_with(MODEL, OLD)
    await killed(stage, stage.one)
    stage.one.restart(ZERO)
    await stage.until_serving(stage.one)
    assert stage.one.loaded == [(MODEL, OLD)]


async def test_one_that_is_lost_before_anything_was_asked_of_it_comes_back(open_stage):
    async with open_stage(Server(URLS[0])) as stage:
        stage.fleet.lose(URLS[0], "its machine is lost")
        await stage.until_serving(stage.one)


async def test_after_a_push_it_is_given_what_was_pushed(stage):
    await push([stage.fleet], WEIGHTS, NEW)
    await killed(stage, stage.one)
    stage.one.restart(ZERO)
    await stage.until_serving(stage.one)
    assert (stage.one.fake.weights[-1], stage.one.fake.version, stage.one.fake.paused) == (WEIGHTS, NEW, None)
    assert stage.report(stage.one).version == NEW


async def test_a_label_that_goes_back_without_a_failure_is_noticed(stage):
    await push([stage.fleet], WEIGHTS, NEW)
    stage.one.restart(ZERO)  # between two probes
    await stage.until(lambda: stage.one.fake.version == NEW)
    await stage.until_serving(stage.one)


async def test_damaged_weights_keep_it_out_until_the_next_ones(stage):
    await push([stage.fleet], WEIGHTS, NEW)
    await killed(stage, stage.one)
    for _ in range(1000):
        stage.one.fake.corrupt_next_push()
    stage.one.restart(ZERO)
    await stage.until(lambda: "the whole push counts as damaged" in stage.report(stage.one).reason)
    assert stage.one.fake.version == ZERO
    stage.one.fake._num_corrupt = 0
    await push([stage.fleet], DiskWeights(path="weights-9"), WeightVersion(step=9))
    await stage.until_serving(stage.one)
    assert stage.one.fake.version == WeightVersion(step=9)


async def test_without_weights_to_give_it_stays_out(stage):
    push_id = "p"
    await stage.fleet.begin_push(push_id)  # from here on the fleet says what is served
    await stage.fleet.abort_push(push_id)
    await killed(stage, stage.one)
    stage.one.restart(ZERO)
    await stage.until(lambda: "has no weights" in stage.report(stage.one).reason)


async def test_another_model_stays_out(stage):
    await killed(stage, stage.one)
    stage.one.fake._vocab_size = 17
    stage.one.restart(OLD)
    await stage.until(lambda: "serves fake, with 17 ids" in stage.report(stage.one).reason)


async def test_one_that_is_not_healthy_stays_out(stage):
    async def unhealthy() -> bool:
        return False

    stage.one.health = unhealthy
    await stage.until(lambda: "not healthy" in stage.report(stage.one).reason)


async def test_where_others_push_the_one_behind_comes_last(stage):
    stage.two.fake.version = NEW  # by somebody else
    await stage.until(lambda: stage.report(stage.two).version == NEW)
    num_infos = stage.one.num_infos
    await stage.until(lambda: stage.one.num_infos > num_infos + 5)
    answers = [stage.start(ask(number)) for number in range(3)]
    await stage.two.until_asked(3)
    stage.two.fake.step(100)
    await asyncio.gather(*answers)
    stage.one.fake.version = NEW
    num_infos = stage.one.num_infos
    await stage.until(lambda: stage.one.num_infos > num_infos + 2)
    answer = stage.start(ask())
    await stage.one.finish()
    await answer
    assert not stage.one.fake.weights and stage.one.fake.paused is None


# -------------------------------------------------------------------------------------------- come and go


async def test_where_the_only_one_is_down_for_a_moment_it_is_asked_again(open_stage):
    async with open_stage(Server(URLS[0])) as stage:
        stage.one.kill()
        asking = asyncio.create_task(stage.fleet.info())
        await stage.until(lambda: stage.state(stage.one) is not MemberState.SERVING)
        stage.one.restart(ZERO)
        assert (await asking).vocab_size == 1_000_000


async def test_a_server_is_added(open_stage):
    spare = Server(URLS[1], version=ZERO)
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        await stage.fleet.info()
        await push([stage.fleet], WEIGHTS, NEW)
        await stage.fleet.add(spare.base_url)
        assert (stage.state(spare), spare.fake.version) == (MemberState.SERVING, NEW)
        answers = [stage.start(ask(number)) for number in range(2)]
        await spare.finish()
        stage.one.fake.step(100)
        await asyncio.gather(*answers)
        spare.kill()  # it has a keeper, too
        await stage.until(lambda: stage.state(spare) is not MemberState.SERVING)


async def test_what_is_wrong_with_an_added_server_is_an_error(open_stage):
    spare = Server(URLS[1], vocab_size=17)
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        await stage.fleet.info()
        with pytest.raises(EngineRejected, match="http://two serves fake, with 17 ids"):
            await stage.fleet.add(spare.base_url)
        spare.kill()
        with pytest.raises(EngineUnreachable, match="down"):
            await stage.fleet.add(spare.base_url)
        with pytest.raises(EngineRejected, match="one of the servers already"):
            await stage.fleet.add(URLS[0])
        assert [one.url for one in stage.fleet.report()] == [URLS[0]]


@pytest.mark.parametrize(
    "version",
    [WeightVersion(step=99), WeightVersion(incarnation=4), NEW],
    ids=["ahead", "of_another_run", "same_label"],
)
async def test_an_added_server_is_given_the_weights_whatever_it_served(open_stage, version):
    spare = Server(URLS[1], version=version)
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        stage.fleet.pushes.begin_with(MODEL, OLD)
        await push([stage.fleet], WEIGHTS, NEW)
        await stage.fleet.add(spare.base_url)
        assert (stage.state(spare), spare.fake.version) == (MemberState.SERVING, NEW)
        assert (spare.loaded, spare.fake.weights) == ([(MODEL, ZERO)], [WEIGHTS])


async def test_before_the_first_push_an_added_server_is_given_the_model(open_stage):
    spare = Server(URLS[1], version=WeightVersion(step=99))
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        stage.fleet.pushes.begin_with(MODEL, OLD)
        await stage.fleet.add(spare.base_url)
        assert (spare.loaded, spare.fake.version) == ([(MODEL, OLD)], OLD)


async def test_who_is_found_ahead_is_brought_back_to_what_is_due(stage):
    stage.fleet.pushes.begin_with(MODEL, OLD)
    await push([stage.fleet], WEIGHTS, NEW)
    stage.one.fake.version = WeightVersion(step=99)  # somebody else pushes to it
    await stage.until(lambda: stage.one.fake.version == NEW)
    await stage.until_serving(stage.one)
    assert stage.one.loaded == [(MODEL, ZERO)]


async def test_one_that_is_removed_while_it_is_added_is_not_added(open_stage):
    spare = Server(URLS[1])
    spare.answers.clear()
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        stage.fleet.pushes.begin_with(MODEL, OLD)
        adding = asyncio.ensure_future(stage.fleet.add(spare.base_url))
        await stage.until(lambda: spare.num_infos > 0)
        await stage.fleet.remove(spare.base_url)
        spare.answers.set()
        with pytest.raises(EngineUnreachable, match="http://two is being removed"):
            await adding
        assert spare.loaded == []
        assert [one.url for one in stage.fleet.report()] == [URLS[0]]


async def test_the_same_server_is_added_once(open_stage):
    spare = Server(URLS[1])
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        adding = [asyncio.ensure_future(stage.fleet.add(spare.base_url)) for _ in range(2)]
        failures = await asyncio.gather(*adding, return_exceptions=True)
        assert [type(failure) for failure in failures] == [type(None), ServerRefused]
        assert [one.url for one in stage.fleet.report()] == list(URLS)


async def test_one_that_is_added_in_a_push_joins_after_it(open_stage):
    spare = Server(URLS[1], version=ZERO)
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        await stage.fleet.begin_push("p")
        adding = asyncio.ensure_future(stage.fleet.add(spare.base_url))
        await stage.fleet.send_push("p", WEIGHTS)
        await stage.fleet.pause(PauseMode.RETRACT)
        await stage.fleet.commit_push("p", NEW)
        assert not adding.done() and spare.fake.version == ZERO
        await stage.fleet.resume()
        await adding
        assert (stage.state(spare), spare.fake.version) == (MemberState.SERVING, NEW)


async def test_one_that_is_removed_in_a_push_leaves_after_it(stage):
    await stage.fleet.begin_push("p")
    leaving = asyncio.ensure_future(stage.fleet.remove(URLS[0]))
    await stage.fleet.send_push("p", WEIGHTS)
    await stage.fleet.pause(PauseMode.RETRACT)
    await stage.fleet.commit_push("p", NEW)
    await stage.fleet.resume()
    await leaving
    assert (stage.one.fake.version, stage.one.fake.paused) == (NEW, None)
    assert [one.url for one in stage.fleet.report()] == [URLS[1]]


async def test_who_gives_up_waiting_for_a_removal_does_not_stop_it(stage):
    answer, *_ = await stage.under_way(num_tokens=0)
    leaving = asyncio.ensure_future(stage.fleet.remove(URLS[0]))
    await stage.until(lambda: stage.state(stage.one) is MemberState.LEAVING)
    leaving.cancel()
    await asyncio.wait({leaving})
    stage.one.fake.step(100)
    await answer
    await stage.until(lambda: [one.url for one in stage.fleet.report()] == [URLS[1]])


async def test_the_only_one_that_serves_stays(stage):
    await killed(stage, stage.two)
    with pytest.raises(ServerRefused, match=r"the only server that serves \(http://two is"):
        await stage.fleet.remove(URLS[0])
    await stage.fleet.remove(URLS[1])


async def test_a_server_that_cannot_take_the_weights_is_not_added(open_stage):
    spare = Server(URLS[1], version=ZERO)
    spare.fake.corrupt_next_push()
    async with open_stage(Server(URLS[0]), spare=(spare,)) as stage:
        await push([stage.fleet], WEIGHTS, NEW)
        with pytest.raises(WeightUpdateError):
            await stage.fleet.add(spare.base_url)
        assert [one.url for one in stage.fleet.report()] == [URLS[0]]


async def test_a_server_that_is_removed_ends_what_it_has(stage):
    answer, *_ = await stage.under_way(num_tokens=0)
    leaving = asyncio.ensure_future(stage.fleet.remove(URLS[0]))
    await stage.until(lambda: stage.state(stage.one) is MemberState.LEAVING)
    another = stage.start(ask(2))
    await stage.two.until_asked()
    stage.one.fake.step(100)
    stage.two.fake.step(100)
    await leaving
    assert [(await one).token_ids for one in (answer, another)] == [tokens(ask(), 8)] * 2
    assert [one.url for one in stage.fleet.report()] == [URLS[1]]


async def test_what_does_not_end_in_time_moves(stage):
    answer, *_ = await stage.under_way()
    await stage.fleet.remove(URLS[0], drain_s=0.01)
    await stage.two.finish()
    assert (await answer).token_ids == tokens(ask(), 8)


async def test_the_last_server_stays(stage):
    await stage.fleet.remove(URLS[0])
    with pytest.raises(EngineRejected, match="the only server"):
        await stage.fleet.remove(URLS[1])
    with pytest.raises(EngineRejected, match="is not one of the servers"):
        await stage.fleet.remove(URLS[0])
