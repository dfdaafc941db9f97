"""Clients that are slow or do not speak HTTP:

- half a head, and a connection without a request, are closed after the idle limit
- half a body is answered with 408 after its limit, with a length and without
- input that is not HTTP gets 400 and an error object, and is not logged
- a client that reads nothing of its answers is disconnected; one that hangs up is no error in the log
"""

import asyncio
import logging
import select
import socket

import pytest

from areal_agent.gateway.bodies import Limits

from .conftest import ADMIN_KEY, OpenAgent, OpenWorld
from .raw import address, is_error_object, parse, say

SHORT_S = 0.05
HEAD = f"POST /rl/start_session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_KEY}\r\n"


@pytest.mark.parametrize("start", [b"", b"GET /he", b"GET /health HTTP/1.1\r\nHost: loc"])
async def test_a_head_that_does_not_come(open_world: OpenWorld, start: bytes) -> None:
    world = await open_world(limits=Limits(idle_timeout_s=SHORT_S))
    assert await say(world.url, start) == b""


async def test_an_idle_connection(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(idle_timeout_s=SHORT_S))
    status, _, _ = parse(await say(world.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
    assert status == 200  # and then it was closed, or this would not have ended


@pytest.mark.parametrize("half", ['Content-Length: 9\r\n\r\n{"', "Transfer-Encoding: chunked\r\n\r\n9\r\n{"])
async def test_a_body_that_does_not_come(open_world: OpenWorld, half: str) -> None:
    world = await open_world(limits=Limits(body_timeout_s=SHORT_S))
    status, headers, body = parse(await say(world.url, (HEAD + half).encode()))
    assert (status, headers["connection"], is_error_object(body)) == (408, "close", True)
    assert world.gateway.stats().num_open_sessions == 0


@pytest.mark.parametrize(
    "noise",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # the start of TLS
        b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * 1000 + b"\r\n",
        HEAD.encode() + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD.encode() + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        HEAD.encode() + b"Content-Length: -1\r\n\r\n",
    ],
    ids=lambda noise: repr(noise)[:40],
)
async def test_what_is_not_http(open_world: OpenWorld, noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    world = await open_world()
    status, _, body = parse(await say(world.url, noise))
    assert (status, is_error_object(body)) == (400, True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_client_that_takes_nothing(open_world: OpenWorld) -> None:
    world = await open_world(limits=Limits(stall_timeout_s=SHORT_S))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address(world.url))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        poll = select.poll()
        poll.register(client, 0)  # tells only of a connection that was reset
        assert await asyncio.to_thread(poll.poll, 20_000)
    async with world.http.get(f"{world.url}/health") as response:
        assert response.status == 200


async def test_hanging_up_is_no_error(open_agent: OpenAgent, caplog: pytest.LogCaptureFixture) -> None:
    agent = await open_agent("abc", is_stepped=True)
    body = b'{"model": "model", "messages": [{"role": "user", "content": "x"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {agent.key}\r\n"
    _, asking = await asyncio.open_connection(*address(agent.world.url))
    asking.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    _, sending = await asyncio.open_connection(*address(agent.world.url))
    sending.write(f"{head}Content-Length: 1000\r\n\r\n".encode() + body)
    await agent.world.engine.wait_for_requests(1)
    asking.close()
    sending.close()
    await agent.world.engine.was_aborted.wait()
    assert (await agent.end())[0] == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert agent.world.gateway.stats().errors == {}
