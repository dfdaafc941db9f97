"""A server that answers as SGLang does, each time as a test wants it. A helper of tests."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from areal_agent.engine.sglang.server import CHECK_WEIGHTS
from areal_agent.engine.wire import control, generate
from areal_agent.types import WeightVersion

from .. import servers

OLD = WeightVersion(step=3)
"""The version that serves at the beginning."""


class ScriptedServer(servers.ScriptedServer):
    """Answers as SGLang does."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.started_with = model
        self.model = model
        self.label = str(OLD)
        self.loaded: list[tuple[str, str]] = []
        self.hangs_at = 0  # which update is never answered
        self.is_hanging = asyncio.Event()
        self.is_incremental = True

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

    def will_answer(self, ids: list[int]) -> None:
        """Answer each request with these tokens from now on."""
        ended = {"finish": {"type": "stop", "matched": ids[-1]}, "weight_versions": spans(len(ids))}
        self.events = [event(ids, len(ids), **ended)]

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}] * 2})

    async def hang(self, _: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def serving(server: ScriptedServer) -> AsyncGenerator[str]:
    """Yield the URL of a scripted server."""
    app = web.Application(middlewares=[server.note])
    app.router.add_get(control.SERVER_INFO, server.server_info)
    app.router.add_get(control.MODEL_INFO, server.model_info)
    app.router.add_get(control.HEALTH, server.hang)
    app.router.add_get("/v1/loads", server.loads)
    app.router.add_post(control.UPDATE_FROM_DISK, server.update)
    app.router.add_post(CHECK_WEIGHTS, server.check)
    app.router.add_post(generate.GENERATE, server.generate)
    for path in (control.PAUSE_GENERATION, control.CONTINUE_GENERATION, control.ABORT_REQUEST):
        app.router.add_post(path, server.yes)
    async with servers.serving_app(app) as url:
        yield url


def event(ids: list[int], num_so_far: int, finish: dict | None = None, **meta: object) -> dict:
    entries = [[-0.5, token_id, None] for token_id in ids]
    fields = {"finish_reason": finish, "completion_tokens": num_so_far, "output_token_logprobs": entries}
    return {"text": "", "output_ids": ids, "meta_info": fields | meta}


def spans(end: int) -> list[dict]:
    return [{"version": str(OLD), "start": 0, "end": end}]
