"""The address of an engine, for a process that is not told of pushes:

- SGLang's and vLLM's servers may be silent for as long as their pusher lets them load the model
- unlabelled weights are the first version, in whole answers and in chunks; for other processes they are unknown
- the embedded engine answers while it loads, so nothing changes for it
- the kind of a server is found out by asking it; what is no engine, or nothing, is an EngineUnreachable that says so
"""

from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from areal_agent.engine.address import EngineAddress, find_backend
from areal_agent.engine.pushes import size_of_folder
from areal_agent.engine.transport import CONTROL_TIMEOUT_S, SLOWEST_BYTES_PER_S
from areal_agent.errors import EngineUnreachable
from areal_agent.types import GenerateRequest, GenerateResult, SamplingParams, TokenChunk, VersionSpan, WeightVersion
from tests.engine.servers import serving_app

from .sglang import scripted as sglang
from .vllm import scripted as vllm


@pytest.mark.parametrize("scripted", [sglang, vllm])
async def test_servers_that_are_silent_while_they_load(scripted, tiny):
    async with scripted.serving(scripted.ScriptedServer(str(tiny))) as url:
        address = await (await EngineAddress.of_server(url)).where_others_push()
    assert address.hung_after_s == CONTROL_TIMEOUT_S + size_of_folder(tiny) / SLOWEST_BYTES_PER_S


UNLABELLED = {"weight_versions": [{"version": "default", "start": 0, "end": 2}]}


def unlabelled_sglang(model: str) -> sglang.ScriptedServer:
    server = sglang.ScriptedServer(model)
    server.label = "default"
    stopped = sglang.event([6], 2, {"type": "stop", "matched": 6}, **UNLABELLED)
    server.events = [sglang.event([5], 1, weight_version="default"), stopped]
    return server


def unlabelled_vllm(model: str) -> vllm.ScriptedServer:
    server = vllm.ScriptedServer(model)
    server.events = [vllm.event([5]), vllm.event([6], finish_reason="stop", **UNLABELLED)]
    return server


async def sampled(address: EngineAddress, chunks: list[TokenChunk]) -> GenerateResult:
    request = GenerateRequest(request_id="one", input_ids=(1, 2), sampling=SamplingParams(max_tokens=4))
    async with aclosing(address.client()(address.urls[0])) as engine:
        return await engine.generate(request, chunks.append)


FIRST = VersionSpan(version=WeightVersion(), start=0, end=2)


@pytest.mark.parametrize(
    ("scripted", "make", "told"), [(sglang, unlabelled_sglang, 1), (vllm, unlabelled_vllm, 0)], ids=["sglang", "vllm"]
)
async def test_weights_that_nobody_has_labelled(scripted, make, told, tiny):
    async with scripted.serving(make(str(tiny))) as url:
        here, chunks = await EngineAddress.of_server(url), list[TokenChunk]()
        result = await sampled(await here.where_others_push(), chunks)
        with pytest.raises(EngineUnreachable, match="'default' is not of the form"):
            await sampled(here, [])
    assert (result.token_ids, result.versions) == ((5, 6), (FIRST,))
    assert chunks[0].versions == (VersionSpan(version=WeightVersion(), start=0, end=1),) * told


async def test_the_embedded_engine():
    address = EngineAddress(backend="embedded", urls=("http://nobody",))
    assert await address.where_others_push() == address


async def test_the_embedded_engine_is_found(served):
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
