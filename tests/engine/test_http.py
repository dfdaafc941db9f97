"""Failures that the client reports: an engine that is missing, redirects, or answers late or with nonsense.

Its time limit grows with the time that its weights take from a slow disk.
"""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from aiohttp import web

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.wire import control, generate
from areal_agent.errors import EngineRejected, EngineUnreachable, WeightUpdateError
from areal_agent.types import DiskWeights, PauseMode, SharedMemoryWeights, TensorEntry, WeightVersion
from tests.engine.servers import serving_app

INFO = {"model_path": "m", "weight_version": "0:0", "vocab_size": 97, "max_context_tokens": 512}


def saying(body: object, status: int = 200):
    """Return a handler with this answer."""

    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return handler


@asynccontextmanager
async def answering(path: str, handler, **settings):
    """Yield a client of a server whose `path` is answered by `handler`."""

    app = web.Application()
    app.router.add_get(control.SERVER_INFO, saying(INFO))
    app.router.add_route("*", path, handler)
    async with serving_app(app) as url, aclosing(HttpEngine(url, **settings)) as engine:
        yield engine


@pytest.fixture
async def nobody(unused_tcp_port):
    async with aclosing(HttpEngine(f"http://127.0.0.1:{unused_tcp_port}")) as engine:
        yield engine


async def test_nobody_there(nobody, ask):
    for call in (nobody.generate(ask()), nobody.pause(PauseMode.RETRACT), nobody.resume(), nobody.info()):
        with pytest.raises(EngineUnreachable, match=r"no answer to .*host 127\.0\.0\.1:\d+ \[.*is the engine running"):
            await call
    assert not await nobody.health()
    await nobody.aclose()  # which the fixture does again


async def test_waiting_for_nobody_ends_with_an_error(nobody):
    with pytest.raises(EngineUnreachable, match=r"did not serve within 0.2 s"):
        await nobody.wait_ready(0.2)


async def test_large_weights_have_more_time_than_other_calls():
    has_run_out = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        """A load counts as ended when a call that began after it goes unanswered; other calls never end one."""
        if request.path == control.SEND_PUSH:
            is_loading.set()
            await has_run_out.wait()
            return web.json_response({})
        return await asyncio.get_running_loop().create_future()

    is_loading = asyncio.Event()
    entry = TensorEntry(name="a", dtype="float32", shape=(2**40,), offset=0, num_bytes=2**42)
    async with answering("/{any:.*}", answer, control_timeout_s=0.05) as engine:
        load = asyncio.create_task(engine.send_push("p", SharedMemoryWeights(path="f", entries=(entry,), crc32=0)))
        await is_loading.wait()
        with pytest.raises(EngineUnreachable, match="no answer"):
            await engine.commit_push("p", WeightVersion(step=1))
        assert not load.done()
        has_run_out.set()
        await load


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (lambda: web.json_response({"error": {"message": "too hot"}}, status=400), EngineRejected, "400: too hot"),
        (lambda: web.Response(text="oops", status=500), EngineUnreachable, "500: oops"),
        (lambda: web.Response(text="<html>"), EngineUnreachable, "not JSON"),
        (lambda: web.json_response({"text": "hi"}), EngineUnreachable, "meta_info"),
        (lambda: web.Response(status=307, headers={"Location": "/elsewhere"}), EngineUnreachable, "307"),
        (lambda: web.json_response({"error": "busy"}, status=429), EngineUnreachable, "429: busy"),  # and no refusal
    ],
)
async def test_answers_that_are_none(response, error, message, ask):
    async def answer(_: web.Request) -> web.Response:
        return response()

    async with answering(generate.GENERATE, answer) as engine:
        with pytest.raises(error, match=message):
            await engine.generate(ask())


async def test_a_refused_update_is_a_weight_update_error():
    refusal = {"success": False, "message": "bad path", "num_paused_requests": 0}
    async with answering(control.UPDATE_FROM_DISK, saying(refusal, status=400)) as engine:
        with pytest.raises(WeightUpdateError, match="bad path"):
            await engine.update_weights(DiskWeights(path="x"), WeightVersion(step=1))
