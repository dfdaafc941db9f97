"""A server that answers as SGLang does, each time as a test wants it. A helper of tests."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from areal_agent.engine.sglang.server import CHECK_WEIGHTS
from areal_agent.engine.wire import control, generate
from areal_agent.types import WeightVersion

from ..servers import serving_app

OLD = WeightVersion(step=3)
"""The version that serves at the beginning."""


class ScriptedServer:
    """Answers as SGLang does; `load_statuses` are used one by one, then updates succeed."""

    def __init__(self, model: str) -> None:
        self.started_with = model
        self.model = model
        self.label = str(OLD)
        self.loaded: list[tuple[str, str]] = []
        self.load_statuses: list[int] = []
        self.hangs_at = 0  # which update is never answered
        self.is_hanging = asyncio.Event()
        self.moves_label = True
        self.is_alive = True
        self.num_broken = 0  # of the next answers, which end before their last event
        self.is_incremental = True
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
        told = {"model_path": self.started_with, "weight_version": "0:0"}
        limits = {"context_length": 512, "max_req_input_len": 506}
        return web.json_response({**told, **limits, "incremental_streaming_output": self.is_incremental})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model, "weight_version": self.label})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.loaded.append((body["model_path"], body["weight_version"]))
        if self.hangs_at == len(self.loaded):
            self.is_hanging.set()
            await asyncio.Event().wait()
        status = self.load_statuses.pop(0) if self.load_statuses else 200
        self.model = body["model_path"]
        if status == 200 and self.moves_label:
            self.label = body["weight_version"]
        return web.json_response({"success": status == 200, "message": "flush failed"}, status=status)

    async def check(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        return web.json_response({"success": False, "message": f"Unsupported action='{action}'"}, status=400)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.num_broken, is_broken = max(0, self.num_broken - 1), self.num_broken > 0
        for event in self.events[:-1] if is_broken else self.events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    def will_answer(self, ids: list[int]) -> None:
        """Answer each request with these tokens from now on."""
        ended = {"finish": {"type": "stop", "matched": ids[-1]}, "weight_versions": spans(len(ids))}
        self.events = [event(ids, len(ids), **ended)]

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}] * 2})

    async def hang(self, _: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def yes(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncGenerator[str]:
    """Yield the URL of a scripted server."""
    app = web.Application(middlewares=[server.count])
    app.router.add_get(control.SERVER_INFO, server.server_info)
    app.router.add_get(control.MODEL_INFO, server.model_info)
    app.router.add_get(control.HEALTH, server.hang)
    app.router.add_get("/v1/loads", server.loads)
    app.router.add_post(control.UPDATE_FROM_DISK, server.update)
    app.router.add_post(CHECK_WEIGHTS, server.check)
    app.router.add_post(generate.GENERATE, server.generate)
    for path in (control.PAUSE_GENERATION, control.CONTINUE_GENERATION, control.ABORT_REQUEST):
        app.router.add_post(path, server.yes)
    async with serving_app(app) as url:
        yield url


def event(ids: list[int], num_so_far: int, finish: dict | None = None, **meta: object) -> dict:
    entries = [[-0.5, token_id, None] for token_id in ids]
    fields = {"finish_reason": finish, "completion_tokens": num_so_far, "output_token_logprobs": entries}
    return {"text": "", "output_ids": ids, "meta_info": fields | meta}


def spans(end: int) -> list[dict]:
    return [{"version": str(OLD), "start": 0, "end": end}]
