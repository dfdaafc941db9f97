"""A server that answers as vLLM does where that surprises, scripted here, so that every answer can be had at will:

- a load that fails after the weights have changed: the weights before are loaded again; where they are not known here,
  or that fails too, nothing is sampled
- a label moves by a call of its own: one that does not move is no success, nor is a cache that is not flushed
- a request names the weights that serve, so that keys and values of others are never taken for its own
- answers: tokens, versions, aborts, likeliest tokens out of order; what contradicts itself is no answer
- it is healthy as long as its scheduler answers; no call goes over a connection that the server may be closing
- a server is given its version when it is started, and one that was started again is known by its label
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web

from areal_agent.cluster.vllm import StartedServer
from areal_agent.engine.vllm.engine import VllmEngine
from areal_agent.engine_types import PauseMode
from areal_agent.errors import EngineUnreachable, WeightUpdateError
from areal_agent.types import FinishReason, VersionSpan, WeightVersion
from areal_agent.weights.push import push

OLD, NEW, NEXT = (WeightVersion(step=step) for step in (3, 4, 5))


class ScriptedServer:
    """Says what vLLM says; `load_statuses` are taken one by one, then loads succeed."""

    def __init__(self, model: str) -> None:
        self.started_with = model
        self.label = "default"
        self.calls: list[str] = []
        self.loaded: list[str] = []
        self.load_statuses: list[int] = []
        self.moves_label = True
        self.flushes = True
        self.is_alive = True
        self.events: list[dict] = []
        self.bodies: list[dict] = []
        self.peers: set[object] = set()
        self.num_calls = 0

    @web.middleware
    async def count(self, request: web.Request, handler) -> web.StreamResponse:
        self.num_calls += 1
        self.calls.append(request.path_qs)
        self.peers.add(request.transport.get_extra_info("peername"))
        return await handler(request)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "root": self.started_with, "max_model_len": 512}]})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": False}, status=200 if self.is_alive else 500)

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "load_folder"
        self.loaded.append(body["args"][0])
        status = self.load_statuses.pop(0) if self.load_statuses else 200
        return web.json_response({"results": [None]}, status=status)

    async def relabel(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.moves_label:
            self.label = body["new_version"]
        return web.json_response({"success": True})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def flush(self, _: web.Request) -> web.Response:
        return web.json_response({"success": self.flushes})

    async def yes(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 170.0
process_start_time_seconds 1.79e+09
"""


@asynccontextmanager
async def answering(server: ScriptedServer) -> AsyncGenerator[VllmEngine]:
    """The client of a scripted server, which listens."""
    app = web.Application(middlewares=[server.count])
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/weight_info", server.weight_info)
    app.router.add_get("/is_paused", server.is_paused)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/collective_rpc", server.rpc)
    app.router.add_post("/update_weight_version", server.relabel)
    app.router.add_post("/reset_prefix_cache", server.flush)
    app.router.add_post("/inference/v1/generate", server.generate)
    for path in ("/pause", "/resume", "/abort_requests"):
        app.router.add_post(path, server.yes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = VllmEngine(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield engine
    finally:
        await engine.aclose()
        await runner.cleanup()


@pytest.fixture
async def scripted(tiny) -> AsyncGenerator[tuple[ScriptedServer, VllmEngine]]:
    server = ScriptedServer(str(tiny))
    async with answering(server) as engine:
        yield server, engine


def event(ids: list[int], *, tops: dict[int, float] | None = None, **choice: object) -> dict:
    """An event of an answer; every token has the same likeliest ones, the sampled one in front."""
    content = [
        {
            "token_id": token_id,
            "logprob": -0.5,
            "top_logprobs": [
                {"token_id": one, "logprob": logprob} for one, logprob in (tops or {token_id: -0.5}).items()
            ],
        }
        for token_id in ids
    ]
    return {"choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, **choice}], "usage": None}


def spans(end: int) -> list[dict]:
    return [{"version": str(OLD), "start": 0, "end": end}]


def ended(num_tokens: int, reason: str = "length") -> dict:
    return {"finish_reason": reason, "weight_versions": spans(num_tokens)}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}


async def test_a_load_that_fails_is_undone(scripted, ask, share, tiny, other):
    server, engine = scripted
    await engine.load(tiny, OLD)
    server.load_statuses, server.events = [500], [event([5], **ended(1))]
    with pytest.raises(WeightUpdateError, match="loaded again"):
        await push([engine], share(other), NEW)
    assert server.loaded[-1] == str(tiny) and server.label == str(OLD)
    assert (await engine.generate(ask(1))).token_ids == (5,)
    await push([engine], share(other), NEW)
    assert server.label == str(NEW)


async def test_nothing_is_sampled_from_weights_that_nobody_knows(scripted, ask, share, tiny, other):
    server, engine = scripted
    await engine.load(tiny, OLD)
    server.load_statuses, server.events = [500, 500], [event([5], **ended(1))]
    with pytest.raises(WeightUpdateError):
        await push([engine], share(other), NEW)
    with pytest.raises(EngineUnreachable, match="nobody knows which weights"):
        await engine.generate(ask(1))
    assert not await engine.health()
    await push([engine], share(other), NEXT)
    assert (await engine.generate(ask(1))).token_ids == (5,)


async def test_weights_of_somebody_else_are_not_put_back(scripted, ask, share, other):
    server, engine = scripted
    server.label, server.load_statuses = str(OLD), [500]  # loaded before this client came
    with pytest.raises(WeightUpdateError, match="is not known here"):
        await push([engine], share(other), NEW)
    with pytest.raises(EngineUnreachable, match="nobody knows which weights"):
        await engine.generate(ask(1))


async def test_a_label_that_does_not_move_is_no_success(scripted, share, other):
    server, engine = scripted
    server.moves_label = False
    with pytest.raises(WeightUpdateError, match="says that it serves default after an update to 0:4"):
        await push([engine], share(other), NEW)


async def test_a_cache_that_is_not_flushed_is_no_success(scripted, share, other):
    server, engine = scripted
    server.flushes = False
    with pytest.raises(WeightUpdateError, match="keeps keys and values of the weights before"):
        await push([engine], share(other), NEW)


async def test_only_a_swap_in_place_keeps_the_cache(scripted, share, other):
    server, engine = scripted
    await push([engine], share(other), NEW, PauseMode.IN_PLACE)
    assert not any("reset_prefix_cache" in call for call in server.calls)
    await push([engine], share(other), NEXT)
    assert any("reset_prefix_cache?reset_running_requests=true" in call for call in server.calls)


async def test_a_request_names_the_weights_that_serve(scripted, ask, share, other):
    server, engine = scripted
    server.events = [event([5], **ended(1))]
    await engine.generate(ask(1))
    await push([engine], share(other), NEW)
    await engine.generate(ask(1))
    assert [body["cache_salt"] for body in server.bodies] == ["default", str(NEW)]


async def test_a_request_says_what_it_asks_for(scripted, ask):
    server, engine = scripted
    server.events = [event([5], **ended(1))]
    await engine.generate(ask(1, top_k=0, stop_token_ids=(3,), logit_bias=((4, 2.0),), regex="a+", seed=7))
    params = server.bodies[0]["sampling_params"]
    assert (params["top_k"], params["stop_token_ids"], params["ignore_eos"], params["logprobs"]) == (0, [3], True, 0)
    assert (params["logit_bias"], params["structured_outputs"], params["seed"]) == ({"4": 2.0}, {"regex": "a+"}, 7)


async def test_tokens_in_events_make_the_answer(scripted, ask):
    server, engine = scripted
    server.events = [event([5]), event([6, 7]), event([], **ended(3, "abort")), USAGE]
    result = await engine.generate(ask(1))
    assert (result.token_ids, result.logprobs, result.cached_tokens) == ((5, 6, 7), (-0.5,) * 3, 8)
    assert result.versions == (VersionSpan(version=OLD, start=0, end=3),)
    assert result.finish_reason is FinishReason.ABORT


async def test_an_abort_before_the_first_token(scripted, ask):
    server, engine = scripted
    server.events = [{"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort", "weight_versions": []}]}]
    assert (await engine.generate(ask(1))).token_ids == ()


@pytest.mark.parametrize(
    ("tops", "likeliest"),
    [
        ({5: -0.5, 8: -1.0, 9: -1.5}, ((5, -0.5), (8, -1.0))),  # the sampled token is among them
        ({5: -7.0, 8: -1.0, 9: -1.5}, ((8, -1.0), (9, -1.5))),  # it is not
        ({5: -0.5, 8: -9999.0, 9: -9999.0}, ((5, -0.5),)),  # the others cannot be sampled
    ],
)
async def test_the_likeliest_tokens_are_ranked(scripted, ask, tops, likeliest):
    server, engine = scripted
    server.events = [event([5], tops=tops, **ended(1))]
    result = await engine.generate(replace(ask(1), num_top_logprobs=2))
    assert result.top_logprobs == (likeliest,) and server.bodies[0]["sampling_params"]["logprobs"] == 3


UNKNOWN = event([5], **ended(1))
UNKNOWN["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([UNKNOWN], "was sampled, is not known"),
        ([event([5], finish_reason="length", weight_versions=None)], "cover 0 of 1 tokens"),
        ([event([5], finish_reason="tired", weight_versions=spans(1))], "finish_reason is 'tired'"),
        ([{"choices": [{"token_ids": [5], "logprobs": {"content": []}}]}], "do not match"),
        ([event([5])], "before its last event"),
        ([{"error": {"message": "EngineCore encountered an issue", "code": 500}}], "500: EngineCore"),
    ],
)
async def test_an_answer_that_cannot_be_believed(scripted, ask, events, message):
    server, engine = scripted
    server.events = events
    with pytest.raises(EngineUnreachable, match=message):
        await engine.generate(ask(1))


async def test_health_is_that_of_the_scheduler(scripted):
    server, engine = scripted
    assert await engine.health()
    server.is_alive = False
    assert not await engine.health()


async def test_every_call_has_a_connection_of_its_own(scripted, ask):
    server, engine = scripted
    server.events = [event([5], **ended(1))]
    for number in range(3):
        await engine.generate(ask(number))
    await engine.stats()
    assert len(server.peers) == server.num_calls


async def test_metrics_are_added_up(scripted):
    server, engine = scripted
    server.label = str(OLD)
    stats = await engine.stats()
    assert (stats.num_running, stats.num_queued, stats.generated_tokens) == (5, 1, 170)
    assert stats.weight_version == OLD


async def test_a_server_that_is_started_is_given_its_version(scripted, tiny):
    server, engine = scripted
    await StartedServer(engine, tiny, OLD).wait_ready(60.0)
    assert (server.loaded, server.label) == ([str(tiny)], str(OLD))
    server.load_statuses = [500]
    with pytest.raises(EngineUnreachable, match="takes no weights"):
        await StartedServer(engine, tiny, NEW).wait_ready(60.0)


async def test_a_server_that_was_started_again_is_known_by_its_label(scripted, share, other):
    server, engine = scripted
    await push([engine], share(other), NEW)
    assert (await engine.info()).weight_version == NEW
    server.label = "default"
    assert (await engine.info()).weight_version == WeightVersion()
    await push([engine], share(other), NEW)
    assert server.label == str(NEW)
