"""The kind of a server is found out by asking it:

- the embedded engine, SGLang and vLLM are told apart
- anything else, or nothing, is an EngineUnreachable that says so
"""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from areal_agent.engine.address import find_backend
from areal_agent.errors import EngineUnreachable
from tests.engine.servers import serving_app

from .sglang import scripted as sglang
from .vllm import scripted as vllm


async def test_the_embedded_engine(served):
    assert await find_backend(served.engine.base_url) == "embedded"


@pytest.mark.parametrize(("kind", "scripted"), [("sglang", sglang), ("vllm", vllm)])
async def test_servers_that_are_not_ours(kind, scripted, tiny):
    async with scripted.serving(scripted.ScriptedServer(str(tiny))) as url:
        assert await find_backend(url) == kind


@asynccontextmanager
async def answering(body: object):
    """A server with the same answer to everything."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    app = web.Application()
    app.router.add_get("/{any:.*}", answer)
    async with serving_app(app) as url:
        yield url


@pytest.mark.parametrize("body", [{}, {"data": [{"owned_by": "somebody"}]}, {"data": "none"}])
async def test_what_is_no_engine(body):
    async with answering(body) as url:
        with pytest.raises(EngineUnreachable, match="neither /server_info nor /v1/models shows"):
            await find_backend(url)


async def test_nobody_is_there(unused_tcp_port):
    with pytest.raises(EngineUnreachable, match="no answer"):
        await find_backend(f"http://127.0.0.1:{unused_tcp_port}")
