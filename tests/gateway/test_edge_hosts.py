"""The names by which a gateway may be called, and the web pages that may call it:

- loopback names, the address it listens on and configured names are allowed; others get 403
- a request has exactly one Host (400)
- a page of another origin is refused, whatever its key (403); one of the gateway's own origin is not
- no answer allows other origins to read it
"""

import pytest

from .conftest import ADMIN_KEY, OpenWorld, World
from .raw import is_error_object, parse, say


async def call_as(world: World, **headers: str) -> tuple[int, dict[str, str], object]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return parse(await say(world.url, f"GET /health HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode()))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:9", "[::1]:8000", "gateway.test", "gateway.test:80"]
)
async def test_its_own_names(open_world: OpenWorld, host: str) -> None:
    world = await open_world(allowed_hosts=["gateway.test"])
    assert (await call_as(world, Host=host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.test", "evil.test:80", "localhost.evil.test", "evil.test@localhost", "localhost@evil.test", "10.0.0.1"),
        *("localhost:99999", "localhost/evil", "[::2]", "[", "a:b:c", "-"),
    ],
)
async def test_names_of_others(open_world: OpenWorld, host: str) -> None:
    world = await open_world(allowed_hosts=["gateway.test"])
    status, _, body = await call_as(world, Host=host)
    assert (status, is_error_object(body)) == (403, True)


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: localhost\r\n"], ids=["none", "two"])
async def test_not_one_host(open_world: OpenWorld, hosts: bytes) -> None:
    world = await open_world()
    status, _, body = parse(await say(world.url, b"GET /health HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n"))
    assert (status, is_error_object(body)) == (400, True)


@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "http://localhost:1", "https://localhost", "localhost", "", "http://["]
)
async def test_pages_of_others(open_world: OpenWorld, origin: str) -> None:
    world = await open_world()
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Origin": origin}
    status, _, body = await call_as(world, Host="localhost:8000", **headers)
    assert (status, is_error_object(body)) == (403, True)


async def test_a_page_of_its_own(open_world: OpenWorld) -> None:
    world = await open_world()
    assert (await call_as(world, Host="localhost:8000", Origin="http://LocalHost:8000"))[0] == 200


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
async def test_no_other_page_may_read(open_world: OpenWorld, method: str) -> None:
    world = await open_world()
    headers = {"Access-Control-Request-Method": "POST"}
    async with world.http.request(method, f"{world.url}/health", headers=headers) as response:
        assert not [name for name in response.headers if name.lower().startswith("access-control")]
