"""A server that answers as vLLM does, each time as a test wants it. A helper of tests."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from aiohttp import web

from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.types import WeightVersion

from .. import servers

OLD = WeightVersion(step=3)
"""The version of what it samples."""


class ScriptedServer(servers.ScriptedServer):
    """Answers as vLLM does."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.card = {"id": "m", "owned_by": "vllm", "root": model, "max_model_len": 512}
        self.label = "default"
        self.loaded: list[str] = []
        self.flushes = True

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [self.card]})

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

    def will_answer(self, ids: list[int]) -> None:
        """Answer each request with these tokens from now on."""
        self.events = [event(ids, **ended(len(ids), "stop"))]

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def flush(self, _: web.Request) -> web.Response:
        return web.json_response({"success": self.flushes})


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="a b"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 170.0
process_start_time_seconds 1.79e+09
"""


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncGenerator[str]:
    """Yield the URL of a scripted server."""
    app = web.Application(middlewares=[server.note])
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/weight_info", server.weight_info)
    app.router.add_get("/is_paused", server.is_paused)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/collective_rpc", server.rpc)
    app.router.add_post("/update_weight_version", server.relabel)
    app.router.add_post("/reset_prefix_cache", server.flush)
    app.router.add_post("/inference/v1/generate", server.generate)
    for path in ("/pause", "/resume", "/abort_requests", "/reset_encoder_cache"):
        app.router.add_post(path, server.yes)
    async with servers.serving_app(app) as url:
        yield url


@asynccontextmanager
async def answering(server: ScriptedServer) -> AsyncGenerator[ForeignEngine]:
    """Yield the client of a scripted server."""
    async with serving(server) as url, aclosing(ForeignEngine(VllmServer(url))) as engine:
        yield engine


def event(ids: list[int], *, tops: dict[int, float] | None = None, **choice: object) -> dict:
    """An event of an answer; every token has the same likeliest tokens, the sampled one first."""
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
