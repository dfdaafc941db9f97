"""Surprising answers of SGLang, given by a scripted server, so that each can be had at will:

- 400 although the weights have changed: the previous weights are loaded again; if that fails, too, or is interrupted,
  nothing is sampled
- a serving folder stays when the call that loaded it is cancelled afterwards
- a pause before a failing load is ended all the same, because the server may be paused
- a server that was started so that events hold all tokens so far is refused
- an update that succeeds without changing the label is a failure
- the label is that of `/model_info`: `/server_info` has the one of the start
- a `/health` that never answers does not matter, a `/server_info` that fails does
- an event without tokens says that a request has begun: from then on an abort goes to the server
- an abort is answered with the last id once more, with all ids, with none, or with a status
- no call uses a connection that the server may just be closing
- SGLang ignores stop tokens with `ignore_eos`: the answer ends here, with the first of them, and its stream is left
- vllm/test_odd_answers.py has errors in mid-stream and streams without an end, which the same code finds
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.sglang.server import SglangAnswer, SglangServer
from areal_agent.engine.wire import control, generate
from areal_agent.errors import EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import FinishReason, PauseMode, VersionSpan, WeightVersion
from areal_agent.weights.push import push

from .conftest import until_one_waits
from .scripted import OLD, ScriptedServer, event, serving, spans

NEW, NEXT = WeightVersion(step=4), WeightVersion(step=5)


ENDED = {"finish": {"type": "length", "length": 1}, "weight_versions": spans(1)}


@pytest.fixture
async def scripted(tiny) -> AsyncGenerator[tuple[ScriptedServer, ForeignEngine]]:
    server = ScriptedServer(str(tiny))
    async with serving(server) as url, aclosing(ForeignEngine(SglangServer(url))) as engine:
        yield server, engine


async def test_400_although_the_weights_changed(scripted, ask, share, other):
    server, engine = scripted
    server.load_statuses, server.events = [400], [event([5], 1, **ENDED)]
    with pytest.raises(WeightUpdateError, match="loaded again"):
        await push([engine], share(other), NEW)
    assert server.loaded[-1] == (server.started_with, str(OLD)) and server.model == server.started_with
    assert (await engine.generate(ask(1))).token_ids == (5,)
    await push([engine], share(other), NEW)
    assert server.label == str(NEW)


async def test_nothing_is_sampled_from_weights_that_nobody_knows(scripted, ask, share, tiny, other):
    server, engine = scripted
    await engine.load(tiny, OLD)
    server.load_statuses = [400, 400]
    server.will_answer([5])
    with pytest.raises(WeightUpdateError):
        await push([engine], share(other), NEW)
    with pytest.raises(EngineUnreachable, match="it is unknown which weights"):
        await engine.generate(ask(1))
    assert not await engine.health()
    await push([engine], share(other), NEXT)
    assert (await engine.generate(ask(1))).token_ids == (5,)
    assert await engine.health()


@pytest.mark.parametrize("hangs_at", [1, 2], ids=["the new weights", "the old ones again"])
async def test_nothing_is_sampled_after_a_load_that_was_cut_short(scripted, ask, share, other, hangs_at):
    server, engine = scripted
    server.load_statuses, server.hangs_at = [400], hangs_at
    pushing = asyncio.create_task(push([engine], share(other), NEW))
    await server.is_hanging.wait()
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    with pytest.raises(EngineUnreachable, match="it is unknown which weights"):
        await engine.generate(ask(1))


class HeldUpFolders(WeightFolders):
    """Folders that are not released while a test holds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.is_releasing, self.may_release = asyncio.Event(), asyncio.Event()
        self.may_release.set()

    async def release(self, folder: Path) -> None:
        self.is_releasing.set()
        await self.may_release.wait()
        await super().release(folder)


async def test_a_folder_that_serves_stays_when_its_call_is_cancelled(tiny, share, other):
    server, folders = ScriptedServer(str(tiny)), HeldUpFolders()
    async with serving(server) as url, aclosing(ForeignEngine(SglangServer(url), folders=folders)) as engine:
        await push([engine], share(other), NEW)
        before = server.model
        await engine.begin_push("p")
        await engine.send_push("p", share(other))
        await engine.pause(PauseMode.RETRACT)
        folders.is_releasing.clear()
        folders.may_release.clear()
        committing = asyncio.create_task(engine.commit_push("p", NEXT))
        await folders.is_releasing.wait()  # of those before
        committing.cancel()
        folders.may_release.set()
        await asyncio.wait({committing})
        assert server.label == str(NEXT) and server.model != before
        assert await asyncio.to_thread(Path(server.model).is_dir)


class PausedWithAFailure(ScriptedServer):
    """A server that reports a failed pause."""

    async def yes(self, request: web.Request) -> web.Response:
        return web.Response(status=500) if request.path == control.PAUSE_GENERATION else await super().yes(request)


async def test_a_pause_that_fails_is_ended(tiny, other):
    server = PausedWithAFailure(str(tiny))
    async with serving(server) as url, aclosing(ForeignEngine(SglangServer(url))) as engine:
        with pytest.raises(EngineUnreachable, match="500"):
            await engine.load(other, NEW)
    assert server.calls[-2:] == [control.PAUSE_GENERATION, control.CONTINUE_GENERATION] and server.loaded == []


async def test_a_label_that_does_not_move_is_no_success(scripted, share, other):
    server, engine = scripted
    server.moves_label = False
    with pytest.raises(WeightUpdateError, match=r"reports that it serves (0:3|default) after an update to 0:4"):
        await push([engine], share(other), NEW)


async def test_label_and_numbers_are_those_of_now(scripted):
    _, engine = scripted
    info, stats = await engine.info(), await engine.stats()
    assert (info.weight_version, info.max_context_tokens) == (OLD, 506), "as much as is served without being cut"
    assert (stats.num_running, stats.num_queued, stats.weight_version) == (4, 2, OLD)


async def test_events_that_hold_all_tokens_are_refused(scripted):
    server, engine = scripted
    server.is_incremental = False
    with pytest.raises(EngineRejected, match="start it with --incremental-streaming-output"):
        await engine.info()


async def test_health_is_that_of_the_scheduler(scripted):
    server, engine = scripted
    assert await engine.health()
    server.is_alive = False
    assert not await engine.health()


async def test_every_call_has_a_connection_of_its_own(scripted, ask):
    server, engine = scripted
    server.will_answer([5])
    for number in range(3):
        await engine.generate(ask(number))
    await engine.stats()
    assert len(server.peers) == len(server.calls)


async def test_a_stop_token_that_the_server_passes_over_ends_the_answer(scripted, ask):
    server, engine = scripted
    events = [event([5], 1), event([6, 3, 3], 4), event([7], 5, {"type": "length"}, weight_versions=spans(5))]
    events[0]["meta_info"]["weight_version"] = events[1]["meta_info"]["weight_version"] = str(OLD)
    server.events = events
    result = await engine.generate(ask(1, min_tokens=2, ignore_eos=True, stop_token_ids=(3,)))
    assert (result.token_ids, result.finish_reason) == ((5, 6, 3), FinishReason.STOP)
    assert result.versions == (VersionSpan(version=OLD, start=0, end=3),)
    params = server.bodies[0]["sampling_params"]
    assert (params["ignore_eos"], params["min_new_tokens"], params["stop_token_ids"]) == (True, 2, [3])


class Beginning(ScriptedServer):
    """A server whose first event has no tokens, and which sends the others when the request is aborted."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.is_aborted = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(generate.encode_event(event([], 0)))
        await self.is_aborted.wait()
        await response.write(generate.encode_event(event([5], 1, ABORTED, weight_versions=spans(1))))
        return response

    async def yes(self, request: web.Request) -> web.Response:
        if request.path == control.ABORT_REQUEST:
            self.is_aborted.set()
        return await super().yes(request)


async def test_an_abort_after_an_event_without_tokens_goes_to_the_server(tiny, ask):
    async with serving(Beginning(str(tiny))) as url, aclosing(ForeignEngine(SglangServer(url))) as engine:
        answer = asyncio.ensure_future(engine.generate(ask(1)))
        await until_one_waits(engine)
        request = engine.requests.by_id[ask(1).request_id]
        while not request._has_begun:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0)
        await engine.abort(ask(1).request_id)
        assert (await answer).token_ids == (5,)


ABORTED = {"type": "abort", "message": "Abort in waiting queue"}


@pytest.mark.parametrize(
    ("ids", "entries", "new"),
    [
        ([7], [5, 6, 7], (7,)),  # the last id once more, and the log-probabilities of all
        ([5, 6, 7], [5, 6, 7], (7,)),  # all of them
        ([7], [7], (7,)),  # the new ones
        ([], [], ()),  # nothing, although more was sampled
        ([7, 7], [7, 5, 6, 7], (7,)),  # an event before it, and it, in one
    ],
)
def test_an_aborted_answer_has_what_arrived(ids, entries, new):
    reader = SglangAnswer()
    reader.read(event([5, 6], 2))
    last = event(ids, 3, ABORTED, weight_versions=spans(3))
    last["meta_info"]["output_token_logprobs"] = [[-0.5, token_id, None] for token_id in entries]
    assert reader.read(last).token_ids == new
    assert reader.result is not None and reader.result.finish_reason is FinishReason.ABORT
    num_tokens = 2 + len(new)
    assert reader.result.token_ids == (5, 6, 7)[:num_tokens]
    assert reader.result.versions == (VersionSpan(version=OLD, start=0, end=num_tokens),)


def test_an_abort_before_the_first_token():
    reader = SglangAnswer()
    reader.read({"text": "", "output_ids": [], "meta_info": {"finish_reason": ABORTED, "completion_tokens": 0}})
    assert reader.result is not None
    assert (reader.result.token_ids, reader.result.versions) == ((), ())


@pytest.mark.parametrize(("status", "error"), [(400, EngineRejected), (503, EngineUnreachable)])
def test_an_abort_with_a_status_is_a_failure(status, error):
    with pytest.raises(error, match=f"{status}: no room"):
        SglangAnswer().read(event([], 0, ABORTED | {"message": "no room", "status_code": status}))
