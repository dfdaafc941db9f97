"""The network of a sandbox, by a real server, a real jail and a real client of HTTP.

1. An allowed host is reached, by a plain request and by CONNECT; 2. through the proxy alone; 3. another port, and
another name of the same address, are refused with a reason; 4. `full` reaches no private address and not this machine;
5. without a network there is no proxy; 6. what is no request of a proxy is refused; 7. private addresses are told from
public ones, however they are written.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sandboxes import Network, Pool, SandboxSpec
from sandboxes.proxy import is_own, is_public

FETCH = """
import os, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler())
try: print(opener.open({url!r}).read().decode())
except Exception as error: print(error, error.read().decode() if hasattr(error, "read") else "")
"""
TUNNEL = """
import socket
channel = socket.create_connection(("127.0.0.1", 3128))
channel.sendall({request!r})
answer = b""
while data := channel.recv(4096): answer += data
print(answer.decode())
"""


@pytest.fixture
def backend() -> str:
    return "jail"


@pytest_asyncio.fixture(loop_scope="module")
async def port() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b"you asked " + head.split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def printed(pool: Pool, network: Network | None, source: str) -> str:
    async with pool.acquire(SandboxSpec(network=network)) as box:
        result = await box.exec_python(source)
    return result.stdout.decode() + result.stderr.decode()


async def test_allowed_host_is_reached(pool: Pool, port: int) -> None:
    network = Network.allow([f"127.0.0.1:{port}"])
    assert await printed(pool, network, FETCH.format(url=f"http://127.0.0.1:{port}/a?b=c")) == (
        "you asked GET /a?b=c HTTP/1.1\n"
    )
    request = f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\nGET /in HTTP/1.1\r\n\r\n".encode()
    answer = await printed(pool, network, TUNNEL.format(request=request))
    assert answer.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
    assert "you asked GET /in" in answer


async def test_the_proxy_is_the_only_way(pool: Pool, port: int) -> None:
    network = Network.allow([f"127.0.0.1:{port}"])
    direct = (
        f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}))\nexcept OSError as error: print(error)"
    )
    assert "Connection refused" in await printed(pool, network, direct)


async def test_what_is_not_allowed_is_refused(pool: Pool, port: int) -> None:
    network = Network.allow(["127.0.0.1:1", f"localhost:{port}"])
    refused = await printed(pool, network, FETCH.format(url=f"http://127.0.0.1:{port}/"))
    assert f"127.0.0.1:{port} is not among the hosts that this sandbox may reach" in refused
    by_name = await printed(pool, network, FETCH.format(url=f"http://localhost:{port}/"))
    assert "cannot be reached at an address that this sandbox may reach" in by_name


async def test_full_reaches_nothing_private(pool: Pool, port: int) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "169.254.169.254"):
        answer = await printed(pool, Network.full(), FETCH.format(url=f"http://{host}:{port}/"))
        assert "cannot be reached" in answer, (host, answer)


@pytest.mark.parametrize("network", [None, Network.none()])
async def test_no_proxy_without_a_network(pool: Pool, network: Network | None) -> None:
    source = "import os, socket\nprint([name for name in os.environ if 'proxy' in name.lower()])\n"
    answer = await printed(pool, network, source + "socket.create_connection(('127.0.0.1', 3128))")
    assert answer.startswith("[]\n")
    assert "ConnectionRefusedError" in answer


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET / HTTP/1.1\r\n\r\n", b"GET ftp://a/ HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", b"CONNECT a:x HTTP/1.1\r\n\r\n"],
)
async def test_what_is_no_request_is_refused(pool: Pool, request_bytes: bytes) -> None:
    answer = await printed(pool, Network.full(), TUNNEL.format(request=request_bytes))
    assert answer.startswith("HTTP/1.1 403 Forbidden")


@pytest.mark.parametrize(
    ("address", "is_it"),
    [
        ("1.1.1.1", True),
        ("2606:4700::1111", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
        ("::10.0.0.1", False),
    ],
)
def test_public_addresses(address: str, is_it: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is is_it


def test_own_address() -> None:
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert not is_own(ipaddress.ip_address("192.0.2.1"))
