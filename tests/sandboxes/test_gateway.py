"""A program reaches its own session of a gateway, by a loopback address, and nothing else.

1. Whole and streamed answers come back as they were given, a piece at a time, large bodies too; 2. whatever key the
program sends, the gateway gets the session's; 3. no path but those below /v1/ is passed on, however it is written;
4. two sandboxes reach their own sessions; 5. many connections at once; 6. what a program reaches ends with the sandbox,
and a request that its program gives up is given up at the gateway; 7. a gateway that is not there is a 502.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from aiohttp import web

from sandboxes import Pool, Sandbox, open_pool

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
        self.num_given_up = 0
        self.url = ""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        num_bytes = sum([len(chunk) async for chunk in request.content.iter_any()])
        if request.path == "/v1/never":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.num_given_up += 1
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


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    runner = web.ServerRunner(web.Server(gateway.answer, handler_cancellation=True))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield gateway
    await runner.cleanup()


@pytest.fixture(params=["subprocess", "jail", pytest.param("docker", marks=pytest.mark.slow)])
async def any_pool(request: pytest.FixtureRequest, require) -> AsyncIterator[Pool]:
    await require(request.param)
    async with open_pool(backend=request.param, wall_s=30.0) as pool:
        yield pool


def session(gateway: Gateway, key: str = "own") -> SimpleNamespace:
    return SimpleNamespace(base_url=gateway.url, api_key=key)


async def ask(box: Sandbox, url: str, *asked: tuple[str, str]) -> list[str]:
    result = await box.exec_python(ASK.format(url=url, asked=asked))
    assert result.is_ok, result
    return result.stdout.decode().splitlines()


async def test_own_session_alone(any_pool: Pool, gateway: Gateway) -> None:
    async with any_pool.acquire() as box, any_pool.acquire() as other:
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


async def test_streams_come_as_they_are_made(any_pool: Pool, gateway: Gateway) -> None:
    source = """
import time, urllib.request
answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(URL + "/stream", b"")
times = []
while line := answer.readline():
    times.append(time.monotonic())
    print(line)
print(times[-1] - times[0] > 0.05, answer.headers["Content-Type"])
"""
    async with any_pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        result = await box.exec_python(source.replace("URL", repr(url)))
        assert result.stdout.endswith(b"True text/event-stream\n"), result
        assert result.stdout.count(b"data: ") == 3
        calls = [ask(box, url, ("/v1/models", "x" * 100_000)) for _ in range(8)]
        assert all('"num_bytes": 100000' in lines[0] for lines in await asyncio.gather(*calls))


async def test_what_is_given_up(any_pool: Pool, gateway: Gateway) -> None:
    async with any_pool.acquire() as box:
        url = await box.expose_gateway(session(gateway))
        call = asyncio.create_task(ask(box, url, ("/v1/never", "")))
        await asyncio.sleep(1.0)
        call.cancel()
        await asyncio.sleep(1.0)
        assert gateway.num_given_up == 1
        gone = SimpleNamespace(base_url="http://127.0.0.1:9/v1", api_key="own")
        [line] = await ask(box, await box.expose_gateway(gone), ("/v1/models", ""))
        assert line.startswith("502 ")
        with pytest.raises(ValueError, match="ends in /v1"):
            await box.expose_gateway(SimpleNamespace(base_url="http://127.0.0.1:9", api_key="own"))
