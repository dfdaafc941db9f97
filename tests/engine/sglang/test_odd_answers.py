"""A server that answers as SGLang does where that surprises, scripted here, so that every answer can be had at will:

- 400 although the weights have changed: the weights before are loaded again; where that fails too, or is cut short,
  nothing is sampled
- an update that is answered with success and does not move the label is none
- the label is the one of `/model_info`: `/server_info` has the one of the start
- a `/health` that never answers does not matter, a `/server_info` that fails does
- an abort that is answered with the last id once more, with all ids, with none, or with a status
- no call goes over a connection that the server may just be closing
- an error in mid-stream, and a stream without an end
"""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from aiohttp import web

from areal_agent.engine import wire
from areal_agent.engine.sglang.answer import SglangAnswer
from areal_agent.engine.sglang.engine import SglangEngine
from areal_agent.errors import EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import FinishReason, VersionSpan, WeightVersion
from areal_agent.weights.push import push

OLD, NEW, NEXT = (WeightVersion(step=step) for step in (3, 4, 5))


class ScriptedServer:
    """Says what SGLang says; `update_answers` are taken one by one, then updates succeed."""

    def __init__(self, model: str) -> None:
        self.started_with = model
        self.model = model
        self.label = str(OLD)
        self.loaded: list[tuple[str, str]] = []
        self.update_statuses: list[int] = []
        self.hangs_at = 0  # which update is never answered
        self.is_hanging = asyncio.Event()
        self.moves_label = True
        self.is_alive = True
        self.events: list[dict] = []
        self.peers: set[object] = set()
        self.num_calls = 0

    @web.middleware
    async def count(self, request: web.Request, handler) -> web.StreamResponse:
        self.num_calls += 1
        self.peers.add(request.transport.get_extra_info("peername"))
        return await handler(request)

    async def server_info(self, _: web.Request) -> web.Response:
        if not self.is_alive:
            return web.Response(status=500)
        return web.json_response(
            {"model_path": self.started_with, "weight_version": "0:0", "context_length": 512, "max_req_input_len": 506}
        )

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model, "weight_version": self.label})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loaded.append((body["model_path"], body["weight_version"]))
        if self.hangs_at == len(self.loaded):
            self.is_hanging.set()
            await asyncio.Event().wait()
        status = self.update_statuses.pop(0) if self.update_statuses else 200
        self.model = body["model_path"]
        if status == 200 and self.moves_label:
            self.label = body["weight_version"]
        return web.json_response({"success": status == 200, "message": "flush failed"}, status=status)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}] * 2})

    async def hang(self, _: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def yes(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@pytest.fixture
async def scripted(tiny) -> AsyncGenerator[tuple[ScriptedServer, SglangEngine]]:
    server = ScriptedServer(str(tiny))
    app = web.Application(middlewares=[server.count])
    app.router.add_get(wire.SERVER_INFO, server.server_info)
    app.router.add_get(wire.MODEL_INFO, server.model_info)
    app.router.add_get(wire.HEALTH, server.hang)
    app.router.add_get("/v1/loads", server.loads)
    app.router.add_post(wire.UPDATE_FROM_DISK, server.update)
    app.router.add_post(wire.GENERATE, server.generate)
    for path in (wire.PAUSE_GENERATION, wire.CONTINUE_GENERATION, wire.ABORT_REQUEST):
        app.router.add_post(path, server.yes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = SglangEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield server, engine
    finally:
        await engine.aclose()
        await runner.cleanup()


def event(ids: list[int], num_so_far: int, finish: dict | None = None, **meta: object) -> dict:
    entries = [[-0.5, token_id, None] for token_id in ids]
    fields = {"finish_reason": finish, "completion_tokens": num_so_far, "output_token_logprobs": entries}
    return {"text": "", "output_ids": ids, "meta_info": fields | meta}


def spans(end: int) -> list[dict]:
    return [{"version": str(OLD), "start": 0, "end": end}]


ENDED = {"finish": {"type": "length", "length": 1}, "weight_versions": spans(1)}


async def test_400_although_the_weights_changed(scripted, ask, share, other):
    server, engine = scripted
    server.update_statuses, server.events = [400], [event([5], 1, **ENDED)]
    with pytest.raises(WeightUpdateError, match="loaded again"):
        await push([engine], share(other), NEW)
    assert server.loaded[-1] == (server.started_with, str(OLD)) and server.model == server.started_with
    assert (await engine.generate(ask(1))).token_ids == (5,)
    await push([engine], share(other), NEW)
    assert server.label == str(NEW)


async def test_nothing_is_sampled_from_weights_that_nobody_knows(scripted, ask, share, other):
    server, engine = scripted
    server.update_statuses, server.events = [400, 400], [event([5], 1, **ENDED)]
    with pytest.raises(WeightUpdateError):
        await push([engine], share(other), NEW)
    with pytest.raises(EngineUnreachable, match="nobody knows which weights"):
        await engine.generate(ask(1))
    assert not await engine.health()
    await push([engine], share(other), NEXT)
    assert (await engine.generate(ask(1))).token_ids == (5,)
    assert await engine.health()


@pytest.mark.parametrize("hangs_at", [1, 2], ids=["the new weights", "the old ones again"])
async def test_nothing_is_sampled_after_a_load_that_was_cut_short(scripted, ask, share, other, hangs_at):
    server, engine = scripted
    server.update_statuses, server.hangs_at = [400], hangs_at
    pushing = asyncio.create_task(push([engine], share(other), NEW))
    await server.is_hanging.wait()
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    with pytest.raises(EngineUnreachable, match="nobody knows which weights"):
        await engine.generate(ask(1))


async def test_a_label_that_does_not_move_is_no_success(scripted, share, other):
    server, engine = scripted
    server.moves_label = False
    with pytest.raises(WeightUpdateError, match=r"says that it serves 0:3 after an update to 0:4"):
        await push([engine], share(other), NEW)


async def test_the_label_of_now_is_not_the_label_of_the_start(scripted):
    _, engine = scripted
    assert (await engine.info()).weight_version == OLD


async def test_the_context_is_what_is_served_without_being_cut(scripted):
    _, engine = scripted
    assert (await engine.info()).max_context_tokens == 506


async def test_a_health_that_never_answers_does_not_matter(scripted):
    server, engine = scripted
    assert await engine.health()
    server.is_alive = False
    assert not await engine.health()


async def test_every_call_has_a_connection_of_its_own(scripted, ask):
    server, engine = scripted
    server.events = [event([5], 1, **ENDED)]
    for number in range(3):
        await engine.generate(ask(number))
    await engine.stats()
    assert len(server.peers) == server.num_calls


async def test_loads_are_added_up(scripted):
    _, engine = scripted
    stats = await engine.stats()
    assert (stats.num_running, stats.num_queued, stats.weight_version) == (4, 2, OLD)


async def test_an_error_in_mid_stream(scripted, ask):
    server, engine = scripted
    server.events = [event([5], 1), {"error": {"message": "too hot", "code": 400}}]
    with pytest.raises(EngineRejected, match="400: too hot"):
        await engine.generate(ask(1))
    server.events = [{"error": {"message": "out of memory", "code": 500}}]
    with pytest.raises(EngineUnreachable, match="500: out of memory"):
        await engine.generate(ask(2))


async def test_a_stream_without_an_end(scripted, ask):
    server, engine = scripted
    server.events = [event([5], 1)]
    with pytest.raises(EngineUnreachable, match="before its last event"):
        await engine.generate(ask(1))


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
