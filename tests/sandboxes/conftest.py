"""A real pool, a real sandbox, and a witness that tells without polling whether a program lives."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from areal_agent.errors import SandboxError
from sandboxes import Pool, Sandbox, open_pool
from sandboxes.bubblewrap import find_walls
from sandboxes.containers.provider import DockerProvider
from sandboxes.jail import Walls

PATIENCE_S = 20.0
BACKENDS = ("subprocess", "namespaces", "bubblewrap")
JAILS = ("namespaces", "bubblewrap")


class Arrival:
    """A program that has connected. Its connection ends when the last process that holds it is dead."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer

    def release(self) -> None:
        self._writer.write(b"go\n")

    async def death(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            assert await self._reader.read() == b""
        self._writer.close()


class Witness:
    """A listener to which programs connect to show that they run."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.port = 0

    def connect(self, name: str = "program") -> str:
        """Python that connects; `witness.recv(9)` then waits until it is released."""
        return (
            f"import socket\nwitness = socket.create_connection(('127.0.0.1', {self.port}))\n"
            f"witness.sendall(b'{name}\\n')\n"
        )

    async def arrival(self) -> Arrival:
        async with asyncio.timeout(PATIENCE_S):
            return await self.arrivals.get()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        await self.arrivals.put(Arrival(name, reader, writer))


@pytest.fixture
async def witness() -> AsyncIterator[Witness]:
    witness = Witness()
    server = await asyncio.start_server(witness.greet, "127.0.0.1", 0)
    witness.port = server.sockets[0].getsockname()[1]
    yield witness
    server.close()


@pytest.fixture
def require() -> Callable[[str], Awaitable[None]]:
    """Skips the test where a backend truly cannot work."""

    async def require(backend: str) -> None:
        try:
            if backend in JAILS:
                await find_walls([Walls(backend)])
            elif backend == "docker":
                await (await DockerProvider.start_with_default_image()).close()
        except SandboxError as error:
            pytest.skip(str(error))

    return require


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with open_pool(backend="subprocess", wall_s=PATIENCE_S) as pool:
        yield pool


@pytest.fixture
async def jails(require: Callable[[str], Awaitable[None]]) -> AsyncIterator[Pool]:
    """For what is judged behind walls only."""
    await require("bubblewrap")
    async with open_pool(backend="bubblewrap", wall_s=PATIENCE_S) as pool:
        yield pool


@pytest.fixture
async def box(pool: Pool) -> AsyncIterator[Sandbox]:
    async with pool.acquire() as box:
        yield box
