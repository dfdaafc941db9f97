"""Real pools and sandboxes, and a witness that tells without polling whether a program lives.

The tests of a module run in one loop and share a pool of each backend: they leave it as it was, or open their own.
"""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

from areal_agent.errors import SandboxError
from sandboxes import Pool, Sandbox, open_pool
from sandboxes.containers.provider import DockerProvider
from sandboxes.link import AgentLink

PATIENCE_S = 20.0
BACKENDS = ["subprocess", "jail", pytest.param("docker", marks=pytest.mark.slow)]
"""Every backend, for what each implements in its own way."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if pytest_asyncio.is_async_test(item) and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


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


@pytest_asyncio.fixture(loop_scope="module")
async def witness() -> AsyncIterator[Witness]:
    witness = Witness()
    server = await asyncio.start_server(witness.greet, "127.0.0.1", 0)
    witness.port = server.sockets[0].getsockname()[1]
    yield witness
    server.close()
    for writer in witness.writers:
        writer.transport.abort()


@asynccontextmanager
async def pool_of(backend: str, **options: int) -> AsyncIterator[Pool]:
    """Open a pool, or skip the test where the backend truly cannot work."""
    async with AsyncExitStack() as stack:
        try:
            if backend == "docker":
                await (await DockerProvider.start(needs_default_image=True)).close()
            pool = await stack.enter_async_context(open_pool(backend=backend, wall_s=PATIENCE_S, **options))
        except SandboxError as error:
            pytest.skip(str(error))
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool_at() -> AsyncIterator[Callable[[str], Awaitable[Pool]]]:
    """The module's pool of a backend."""
    pools: dict[str, Pool] = {}
    async with AsyncExitStack() as stack:

        async def pool_at(backend: str) -> Pool:
            if backend not in pools:
                pools[backend] = await stack.enter_async_context(pool_of(backend))
            return pools[backend]

        yield pool_at


@pytest.fixture
def backend() -> str:
    """The backend of `pool` and `box`, which a module changes or has as a parameter."""
    return "subprocess"


@pytest_asyncio.fixture(loop_scope="module")
async def pool(backend: str, pool_at: Callable[[str], Awaitable[Pool]]) -> Pool:
    return await pool_at(backend)


@pytest_asyncio.fixture(loop_scope="module")
async def jails(pool_at: Callable[[str], Awaitable[Pool]]) -> Pool:
    """For what is judged behind walls only."""
    return await pool_at("jail")


@pytest_asyncio.fixture(loop_scope="module")
async def box(pool: Pool) -> AsyncIterator[Sandbox]:
    async with pool.acquire() as box:
        yield box


@pytest.fixture
def soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are started from now on may be silent for 5 s."""
    monkeypatch.setitem(AgentLink.__init__.__kwdefaults__, "silence_s", 5.0)


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
