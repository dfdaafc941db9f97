"""A fleet in another process than the one that pushes, as in a rollout worker; and tokens of unknown weights:

- a server that is out in the pushing process is out here at once, and its requests move; it is back as quickly
- a server that goes out there while it is being taken back here is not taken back
- servers that join or leave there do so here; requests at a leaving one end there
- the view changes with states and members, and before the first token of a new version
- tokens of a version that was never given are not recorded: another server samples them, or a watched answer fails
- word of a version may come after its first tokens, which are kept then
- a server with a version that was never given stays out
- loads are announced, with success or failure; a server that is silent meanwhile does not count as hung
- within an answer versions never go back: tokens of a server that does are not recorded
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from areal_agent.engine.fleet.member import FleetView, MemberState
from areal_agent.errors import EngineUnreachable
from areal_agent.types import DiskWeights, TokenChunk, VersionSpan, WeightVersion
from areal_agent.weights.push import push

from .conftest import NEW, OLD, PATIENT, URLS, Server, Stage, ask, tokens

STRANGE = WeightVersion(incarnation=3, step=1)
SHORT = replace(PATIENT, probe_timeout_s=0.05)  # how long an unknown version is waited for
MODEL, WEIGHTS = Path("model"), DiskWeights(path="weights-8")


def view(*serving: str, out: dict[str, str] | None = None, versions: tuple[WeightVersion, ...] = (OLD,)) -> FleetView:
    return FleetView(serving=serving, out=out or {}, versions=tuple(map(str, versions)))


async def test_who_is_out_there_is_out_here_and_back_at_once(stage: Stage):
    stage.fleet.follow(view(*URLS))
    answer, *_ = await stage.under_way()
    stage.fleet.follow(view(URLS[1], out={URLS[0]: "it missed a push"}))
    await stage.two.finish()
    assert (await answer).token_ids == tokens(ask(), 8)
    num_infos = stage.one.num_infos
    await stage.until(lambda: stage.one.num_infos > num_infos + 3)  # it answers, and its keeper may not believe it
    assert stage.state(stage.one) is not MemberState.SERVING
    assert stage.report(stage.one).reason == "http://one is out: it missed a push"
    stage.fleet.follow(view(*URLS))
    await stage.until_serving(stage.one)


async def test_who_is_out_there_while_it_is_taken_back_stays_out(stage: Stage):
    stage.fleet.follow(view(*URLS))
    stage.one.kill()
    await stage.until(lambda: stage.state(stage.one) is not MemberState.SERVING)
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def health() -> bool:
        is_asked.set()
        await may_answer.wait()
        return True

    stage.one.health = health  # type: ignore[method-assign]
    stage.one.restart(OLD)
    await is_asked.wait()
    stage.fleet.follow(view(URLS[1], out={URLS[0]: "it missed a push"}))
    may_answer.set()
    await stage.until(lambda: stage.state(stage.one) is not MemberState.CATCHING_UP)
    assert stage.report(stage.one).reason == "http://one is out: it missed a push"


async def test_who_joins_and_leaves_there_does_so_here(open_stage):
    spare = Server("http://three")
    async with open_stage(*map(Server, URLS), spare=(spare,)) as stage:
        answer, *_ = await stage.under_way(num_tokens=0)
        stage.fleet.follow(view(URLS[1], spare.base_url))
        await stage.until_serving(spare)
        assert stage.state(stage.one) is MemberState.LEAVING
        stage.one.fake.step(100)
        assert (await answer).token_ids == tokens(ask(), 8)
        assert len(stage.two.fake.requests) == 0
        await stage.until(lambda: [one.url for one in stage.fleet.report()] == [URLS[1], spare.base_url])


async def test_one_that_joins_again_while_it_leaves_is_there_in_the_end(stage: Stage):
    answer, *_ = await stage.under_way(num_tokens=0)
    stage.fleet.follow(view(URLS[1]))
    stage.fleet.follow(view(*URLS))
    assert stage.state(stage.one) is MemberState.LEAVING
    stage.one.fake.step(100)
    await answer
    await stage.until_serving(stage.one)


async def test_a_view_is_told_of_at_every_change(stage: Stage):
    stage.fleet.pushes.begin_with(MODEL, OLD)
    assert stage.fleet.view() == view(*URLS)
    changed = asyncio.ensure_future(stage.fleet.roster.changed())
    await asyncio.sleep(0)
    stage.one.kill()
    await changed
    assert stage.fleet.view() == view(URLS[1], out={URLS[0]: stage.report(stage.one).reason})
    await stage.fleet.remove(URLS[0])
    assert stage.fleet.view() == view(URLS[1])


async def test_a_version_is_told_of_before_its_first_token(stage: Stage):
    stage.fleet.pushes.begin_with(MODEL, OLD)
    seen: list[tuple[str, ...]] = []
    commit = stage.one.fake.commit_push

    async def watched_commit(push_id: str, version: WeightVersion) -> None:
        seen.append(stage.fleet.view().versions)
        await commit(push_id, version)

    stage.one.commit_push = watched_commit  # type: ignore[method-assign]
    await push([stage.fleet], WEIGHTS, NEW)
    assert seen == [(str(OLD), str(NEW))]


@pytest.mark.parametrize("does_fail", [False, True])
async def test_a_load_is_told_of_and_its_end(stage: Stage, does_fail: bool):
    stage.fleet.pushes.begin_with(MODEL, OLD)
    seen: list[bool] = []

    async def follow() -> None:
        while True:
            seen.append(stage.fleet.view().is_loading)
            await stage.fleet.roster.changed()

    following = asyncio.ensure_future(follow())
    for server in stage.servers.values():
        server.moves_label = not does_fail
        server.may_load.clear()
    pushed = asyncio.ensure_future(push([stage.fleet], WEIGHTS, NEW))
    await stage.until(lambda: stage.fleet.view().is_loading)
    for server in stage.servers.values():
        server.may_load.set()
    await asyncio.wait({pushed})
    assert (pushed.exception() is not None) == does_fail
    await stage.until(lambda: not seen[-1])
    assert True in seen
    following.cancel()
    await asyncio.wait({following})


async def test_who_is_silent_in_a_load_there_does_not_hang_here(open_stage):
    hasty = replace(PATIENT, hung_after_s=0.0, probe_timeout_s=0.01)
    async with open_stage(*map(Server, URLS), patience=hasty) as stage:
        stage.fleet.follow(view(*URLS))
        stage.fleet.follow(view(*URLS, versions=(OLD, NEW)).model_copy(update={"is_loading": True}))
        stage.silence(stage.one)
        await stage.looked_at(stage.one)
        assert stage.state(stage.one) is MemberState.SERVING
        stage.fleet.follow(view(*URLS, versions=(NEW,)))
        await stage.until(lambda: stage.state(stage.one) is not MemberState.SERVING)


async def test_tokens_of_a_version_that_was_never_given_are_sampled_elsewhere(open_stage):
    async with open_stage(*map(Server, URLS), patience=SHORT) as stage:
        stage.fleet.follow(view(*URLS))
        answer, *_ = await stage.under_way()
        stage.one.fake.version = STRANGE  # somebody else has started it again, or pushes to it
        stage.one.fake.step(100)
        await stage.two.until_asked()
        assert tuple(stage.two.fake.requests[0].input_ids) == (*ask().input_ids, *tokens(ask(), 3))
        stage.two.fake.step(100)
        result = await answer
        assert (result.token_ids, result.versions) == (tokens(ask(), 8), (VersionSpan(version=OLD, start=0, end=8),))
        await stage.until(lambda: "not the version served" in stage.report(stage.one).reason)
        assert stage.state(stage.one) is not MemberState.SERVING


async def test_a_watched_answer_with_such_tokens_fails(open_stage):
    async with open_stage(*map(Server, URLS), patience=SHORT) as stage:
        stage.fleet.follow(view(*URLS))
        seen: list[TokenChunk] = []
        answer, *_ = await stage.under_way(num_tokens=0, on_chunk=seen.append)
        stage.one.fake.version = STRANGE
        stage.one.fake.step(100)
        with pytest.raises(
            EngineUnreachable, match=r"broke off after 8 tokens.*version 3:1 is not the version served here"
        ):
            await answer


async def test_word_of_a_version_may_come_after_its_tokens(stage: Stage):
    stage.fleet.follow(view(*URLS))
    answer, *_ = await stage.under_way(num_tokens=0)
    stage.one.fake.version = NEW
    stage.one.fake.step(100)
    await asyncio.sleep(0)
    stage.fleet.follow(view(*URLS, versions=(OLD, NEW)))
    assert (await answer).versions == (VersionSpan(version=NEW, start=0, end=8),)
    assert stage.state(stage.one) is MemberState.SERVING


async def test_within_an_answer_versions_never_go_back(stage: Stage):
    stage.fleet.follow(view(*URLS))
    stage.fleet.follow(view(*URLS, versions=(NEW,)))
    for server in stage.servers.values():
        server.fake.version = NEW
    answer, *_ = await stage.under_way()
    stage.two.fake.version = OLD  # it has been started again, and nobody has noticed yet
    stage.one.kill()
    await stage.two.finish()
    await stage.until(lambda: stage.state(stage.two) is not MemberState.SERVING)
    stage.one.restart(NEW)
    await stage.one.until_asked(2)
    assert tuple(stage.one.fake.requests[1].input_ids) == (*ask().input_ids, *tokens(ask(), 3))
    stage.one.fake.step(100)
    assert (await answer).versions == (VersionSpan(version=NEW, start=0, end=8),)
