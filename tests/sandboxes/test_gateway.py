"""A program reaches its own session of a gateway, by a loopback address, and nothing else.

1. Whole and streamed answers come back as they were given, a piece at a time, large bodies too; 2. whatever key the
program sends, the gateway gets the session's; 3. no path but those below /v1/ is passed on, however it is written;
4. two sandboxes reach their own sessions; 5. many connections at once; 6. what a program reaches ends with the sandbox,
and a request that its program gives up is given up at the gateway; 7. a gateway that is not there, or goes away, is a
502; 8. a body that is not read holds up neither other connections nor the sandbox's end; 9. what is not HTTP is
answered, and is not in the host's log; 10. what is asked for ends with the tunnel's process.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
from aiohttp import web

from sandboxes import Pool, Sandbox
from tests.sandboxes.conftest import BACKENDS

in_every_backend = pytest.mark.parametrize("backend", BACKENDS)

ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", int({url!r}.split(":")[2].split("/")[0]), timeout=20)
for path, body in {asked!r}:
    headers = {{"Authorization": "Bearer another", "X-Api-Key": "another", "Cookie": "a=b"}}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    print(answer.status, answer.read().decode())
"""


class Gateway:
    """What gateways are to a program: it tells what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.is_waiting, self.has_given_up = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/unread":
            await asyncio.sleep(60)
        if request.path == "/v1/gone" and request.transport:
            request.transport.abort()
        num_bytes = sum([len(chunk) async for chunk in request.content.iter_any()])
        if request.path == "/v1/never":
            self.is_waiting.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.has_given_up.set()
                raise
        if request.path != "/v1/stream":
            named = {name: request.headers.get(name) for name in ("Authorization", "X-Api-Key", "Cookie")}
            return web.json_response({"path": request.raw_path, "num_bytes": num_bytes, **named})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(f"data: {number}\n\n".encode())
            await asyncio.sleep(0.05)
        return response


@pytest_asyncio.fixture(loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    runner = web.ServerRunner(web.Server(gateway.answer, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield gateway
    await runner.cleanup()


def session(gateway: Gateway, key: str = "own") -> SimpleNamespace:
    return SimpleNamespace(base_url=gateway.url, api_key=key)


async def ask(box: Sandbox, url: str, *asked: tuple[str, str]) -> list[str]:
    result = await box.exec_python(ASK.format(url=url, asked=asked))
    assert result.is_ok, result
    return result.stdout.decode().splitlines()


@in_every_backend
async def test_own_session_alone(pool: Pool, gateway: Gateway) -> None:
    async with pool.acquire() as box, pool.acquire() as other:
        url, other_url = await box.expose_gateway(session(gateway)), await other.expose_gateway(session(gateway, "two"))
        [first, *refused] = await ask(
            box, url, ("/v1/chat/completions?a=%2F", "x" * 3_000_000), ("/rl/set_reward", ""), ("/v1/../rl/end", ""),
            ("/v1/%2e%2e/rl/end", ""), ("http://example.com/v1/x", ""), ("/v1x", ""),
        )  # fmt: skip
        told = json.loads(first.removeprefix("200 "))
        assert told == {
            "path": "/v1/chat/completions?a=%2F",
            "num_bytes": 3_000_000,
            "Authorization": "Bearer own",
            "X-Api-Key": None,
            "Cookie": None,
        }
        assert all(line.startswith("404 ") for line in refused), refused
        assert "Bearer two" in (await ask(other, other_url, ("/v1/models", "")))[0]


@in_every_backend
async def test_streams_come_as_they_are_made(pool: Pool, gateway: Gateway) -> None:
    source = """
import time, urllib.request
answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(URL + "/stream", b"")
times = []
while line := answer.readline():
    times.append(time.monotonic())
    print(line)
print(times[-1] - times[0] > 0.05, answer.headers["Content-Type"])
"""
    async with pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        result = await box.exec_python(source.replace("URL", repr(url)))
        assert result.stdout.endswith(b"True text/event-stream\n"), result
        assert result.stdout.count(b"data: ") == 3
        calls = [ask(box, url, ("/v1/models", "x" * 100_000)) for _ in range(8)]
        assert all('"num_bytes": 100000' in lines[0] for lines in await asyncio.gather(*calls))


@in_every_backend
async def test_what_is_given_up(pool: Pool, gateway: Gateway) -> None:
    async with pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        call = asyncio.create_task(ask(box, url, ("/v1/never", "")))
        await gateway.is_waiting.wait()
        call.cancel()
        await gateway.has_given_up.wait()
        gone = SimpleNamespace(base_url="http://127.0.0.1:9/v1", api_key="own")
        [line] = await ask(box, await box.expose_gateway(gone), ("/v1/models", ""))
        assert line.startswith("502 ")
        with pytest.raises(ValueError, match="ends in /v1"):
            await box.expose_gateway(SimpleNamespace(base_url="http://127.0.0.1:9", api_key="own"))


UPLOAD = """
import socket, time
with socket.create_connection(("127.0.0.1", int(URL.split(":")[2].split("/")[0])), timeout=1) as upload:
    upload.sendall(b"POST /v1/unread HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 90000000\\r\\n\\r\\n")
    try:
        upload.sendall(b"x" * 90_000_000)
    except TimeoutError:
        print("nobody reads", flush=True)
    time.sleep(60)
"""


@in_every_backend
async def test_a_body_that_is_not_read(pool: Pool, gateway: Gateway) -> None:
    async with asyncio.timeout(30), pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        upload = await box.spawn_python(UPLOAD.replace("URL", repr(url)))
        assert await anext(upload.stdout) == b"nobody reads\n"
        for _ in range(3):
            [line] = await ask(box, url, ("/v1/models", "x" * 1_000_000))
            assert '"num_bytes": 1000000' in line


RAW = """
import socket
for sent in {sent!r}:
    with socket.create_connection(("127.0.0.1", int({url!r}.split(":")[2].split("/")[0])), timeout=20) as channel:
        channel.sendall(sent)
        channel.settimeout(5)
        print(channel.recv(99).split(b"\\r\\n")[0].decode())
"""


@in_every_backend
async def test_what_is_not_http(pool: Pool, gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host, long = b" HTTP/1.1\r\nHost: x\r\n", b"Content-Length: 2000000\r\n"
    sent = (
        b"\0\1\2\r\n\r\n",
        b"POST /v1/models" + host + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /v1/models" + host + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"CONNECT /v1/models" + host + b"\r\n",
        b"GET /v1/gone" + host + b"\r\n",
        b"POST /v1/models" + host + long + b"Expect: 100-continue\r\n\r\n",
    )
    async with pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        result = await box.exec_python(RAW.format(url=url, sent=sent))
    statuses = [line.split(" ")[1] for line in result.stdout.decode().splitlines()]
    assert statuses == ["400", "400", "400", "405", "502", "100"], result
    assert not [one for one in caplog.records if one.name.startswith(("sandboxes.gateway", "aiohttp.server"))]


async def test_the_tunnel_is_killed(pool: Pool, gateway: Gateway) -> None:
    async with asyncio.timeout(30), pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        call = asyncio.create_task(ask(box, url, ("/v1/never", "")))
        await gateway.is_waiting.wait()
        os.kill(listener_of(int(url.split(":")[2].split("/")[0])), signal.SIGKILL)
        await gateway.has_given_up.wait()
        with pytest.raises(AssertionError, match="NONZERO"):
            await call
        again = await box.expose_gateway(session(gateway))
        assert "Bearer own" in (await ask(box, again, ("/v1/models", "")))[0]


def listener_of(port: int) -> int:
    """Return the process of this machine that listens at a port."""
    lines = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
    [inode] = [line[9] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"socket:[{inode}]":
                return int(link.parts[2])
    raise AssertionError(f"nobody listens at port {port}")
