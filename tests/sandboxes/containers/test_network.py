"""The way of a container to the network: a tunnel to the filtering proxy, and nothing beside it.

1. what is allowed is reached, and nothing else; 2. much data both ways, many connections at once; 3. programs cannot
harm the tunnel; 4. without a network there is no tunnel.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from sandboxes.cell import ContainerCell
from sandboxes.containers.provider import DockerProvider
from sandboxes.spec import CellSpec, Limits, Network, Program, Status

PATIENT = Limits(wall_s=60.0, output_bytes=2**20)
FETCH = """
import http.client, sys
for host, port in {places}:
    connection = http.client.HTTPConnection("127.0.0.1", 3128)
    connection.request("POST", f"http://{{host}}:{{port}}/", body=b"x" * {num_bytes})
    print(connection.getresponse().read().decode(errors="replace").strip()[:80])
"""


async def count_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A web server that answers with the length of what it got, and as much again."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")).split()[1])
    await reader.readexactly(length)
    body = b"%d " % length + b"y" * length
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port() -> AsyncIterator[int]:
    server = await asyncio.start_server(count_bytes, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connected(provider: DockerProvider, port: int) -> AsyncIterator[ContainerCell]:
    network = Network.allow([f"127.0.0.1:{port}"])
    cell = await provider.create(CellSpec(limits=PATIENT, network=network))
    yield cell
    await cell.close()


async def fetch(cell: ContainerCell, *places: tuple[str, int], num_bytes: int = 1) -> list[str]:
    source = FETCH.format(places=places, num_bytes=num_bytes)
    result = await cell.exec(Program(source=source), stdin=b"", limits=PATIENT)
    assert result.is_ok, result
    return result.stdout.decode().splitlines()


async def test_what_is_allowed_is_reached_and_nothing_else(connected: ContainerCell, port: int) -> None:
    answers = await fetch(connected, ("127.0.0.1", port), ("127.0.0.1", port + 1), ("localhost", port))
    assert answers[0] == "1 y"
    assert all("not among the hosts" in answer for answer in answers[1:])


async def test_environment_names_the_proxy(connected: ContainerCell, port: int) -> None:
    source = f"import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:{port}', data=b'abc').read())"
    assert (await connected.exec(Program(source=source), stdin=b"", limits=PATIENT)).stdout == b"b'3 yyy'\n"


async def test_much_data_over_many_connections(connected: ContainerCell, port: int) -> None:
    size = 2**20
    calls = [fetch(connected, ("127.0.0.1", port), num_bytes=size) for _ in range(8)]
    assert [answer[0].split()[0] for answer in await asyncio.gather(*calls)] == [str(size)] * 8


async def test_programs_cannot_harm_the_tunnel(connected: ContainerCell, port: int) -> None:
    source = """
import os, socket
for pid in {int(name) for name in os.listdir('/proc') if name.isdigit()} - {os.getpid()}:
    for name in ('mem', 'fd/0', 'fd/1', 'environ'):
        try:
            open(f'/proc/{pid}/{name}', 'rb')
            print('opened', pid, name)
        except OSError: pass
for _ in range(200):
    with socket.create_connection(('127.0.0.1', 3128)) as channel: channel.sendall(os.urandom(100))
os.kill(-1, 9)
"""
    result = await connected.exec(Program(source=source), stdin=b"", limits=PATIENT)
    assert (result.status, result.stdout) == (Status.OK, b"")
    assert await fetch(connected, ("127.0.0.1", port)) == ["1 y"]


async def test_without_a_network_there_is_no_tunnel(cell: ContainerCell) -> None:
    source = "import socket\ntry: socket.create_connection(('127.0.0.1', 3128))\nexcept OSError as error: print(error)"
    assert b"refused" in (await cell.exec(Program(source=source), stdin=b"", limits=PATIENT)).stdout
