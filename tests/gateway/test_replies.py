"""A client that hangs up while its answer is sent causes no error, neither counted nor logged."""

import logging
from collections import Counter

import pytest
from aiohttp import ClientSession, ServerDisconnectedError, web
from aiohttp.test_utils import TestServer

from areal_agent.gateway.server import error_boundary


async def _answer_after_the_end(request: web.BaseRequest) -> web.StreamResponse:
    reply = web.StreamResponse()
    assert request.transport is not None
    request.transport.close()  # as the event loop does when it hears of the client's end
    await reply.prepare(request)
    await reply.write(b"too late")
    return reply


async def test_a_client_that_left_before_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    errors: Counter[int] = Counter()
    app = web.Application()
    app.router.add_get("/", error_boundary(_answer_after_the_end, errors))
    async with TestServer(app) as server, ClientSession() as client:
        with pytest.raises(ServerDisconnectedError):
            await client.get(server.make_url("/"))
    assert not errors
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
