"""A real pool, a real sandbox, and a witness that tells without polling whether a program lives."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress

import pytest

from areal_agent.errors import SandboxError
from sandboxes import Pool, Sandbox, open_pool
from sandboxes.containers.provider import DockerProvider
from sandboxes.jail import try_jail

PATIENCE_S = 20.0


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
        self.writers: list[asyncio.StreamWriter] = []

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
        self.writers.append(writer)
        name = (await reader.readline()).decode().strip()
        await self.arrivals.put(Arrival(name, reader, writer))


@pytest.fixture
async def witness() -> AsyncIterator[Witness]:
    witness = Witness()
    server = await asyncio.start_server(witness.greet, "127.0.0.1", 0)
    witness.port = server.sockets[0].getsockname()[1]
    yield witness
    server.close()
    for writer in witness.writers:
        writer.transport.abort()


@pytest.fixture
def require() -> Callable[[str], Awaitable[None]]:
    """Skips the test where a backend truly cannot work."""

    async def require(backend: str) -> None:
        try:
            if backend == "jail":
                await try_jail()
            elif backend == "docker":
                await (await DockerProvider.start(needs_default_image=True)).close()
        except SandboxError as error:
            pytest.skip(str(error))

    return require


@asynccontextmanager
async def pool_of(backend: str, require: Callable[[str], Awaitable[None]]) -> AsyncIterator[Pool]:
    await require(backend)
    async with open_pool(backend=backend, wall_s=PATIENCE_S) as pool:
        yield pool


@pytest.fixture
def backend() -> str:
    """The backend of `pool` and `box`; modules for several backends have a fixture of their own."""
    return "subprocess"


@pytest.fixture
async def pool(backend: str, require: Callable[[str], Awaitable[None]]) -> AsyncIterator[Pool]:
    async with pool_of(backend, require) as pool:
        yield pool


@pytest.fixture
async def box(pool: Pool) -> AsyncIterator[Sandbox]:
    async with pool.acquire() as box:
        yield box


@pytest.fixture
async def jails(require: Callable[[str], Awaitable[None]]) -> AsyncIterator[Pool]:
    """For what is judged behind walls only."""
    async with pool_of("jail", require) as pool:
        yield pool


@pytest.fixture(params=["subprocess", "jail", pytest.param("docker", marks=pytest.mark.slow)])
async def any_box(request: pytest.FixtureRequest, require: Callable[[str], Awaitable[None]]) -> AsyncIterator[Sandbox]:
    """A sandbox of every backend, for what each implements in its own way."""
    async with pool_of(request.param, require) as pool, pool.acquire() as box:
        yield box


@pytest.fixture
def descriptors_left() -> Callable[[int], AbstractContextManager[None]]:
    @contextmanager
    def descriptors_left(number: int) -> Iterator[None]:
        """This process may open so many more."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(number)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(number):
            os.close(taken.pop())
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)

    return descriptors_left
