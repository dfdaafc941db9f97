"""Server processes that are started again when they die, each at the URL where it was.

    start ─▶ serves ─▶ (its process dies) ─▶ start ...      three deaths within a minute of service: it is given up

Clients find out by themselves that a server is back. When all servers are given up, the engine has failed.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from areal_agent.errors import ArealAgentError, EngineUnreachable, ProcessDied
from areal_agent.process import ManagedProcess

logger = logging.getLogger(__name__)


MAX_DEATHS = 3
WITHIN_S = 60.0


class DeathCount:
    """Counts deaths against the time of service. Starts do not count as service: they may take longer than a minute.

    >>> now = iter([0.0, 50.0, 80.0, 85.0])
    >>> count = DeathCount(now=lambda: next(now))
    >>> count.begin(); count.end()           # served for 50 s
    False
    >>> count.begin(); count.end()           # for 5 s
    False
    >>> count.end()                          # died in its start
    True
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since: float | None = None
        self._served_s = 0.0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    def begin(self) -> None:
        """Start counting service."""
        self._since = self._now()

    def end(self) -> bool:
        """Count a death. Return whether it completes `MAX_DEATHS` within `WITHIN_S` of service."""
        if self._since is not None:
            self._served_s += self._now() - self._since
            self._since = None
        self._deaths.append(self._served_s)
        return len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] <= WITHIN_S


class KeptServer:
    """One server at one URL, served by one process after the other if need be."""

    def __init__(
        self,
        start: Callable[[], Awaitable[ManagedProcess]],
        serves: Callable[[ManagedProcess], Awaitable[str]],
        end: Callable[[ManagedProcess], Awaitable[None]],
    ) -> None:
        """`serves` returns the URL once the server serves, and raises ProcessDied or EngineUnreachable otherwise."""
        self.url = ""  # set once it has been started
        self.process: ManagedProcess | None = None
        self._start = start
        self._serves = serves
        self._end = end
        self._deaths = DeathCount()

    async def start(self) -> None:
        """Start a process, and wait until it serves. Raises ProcessDied and EngineUnreachable."""
        self.process = await self._start()
        self.url = await self._serves(self.process)
        self._deaths.begin()

    async def keep(self) -> ProcessDied:
        """Start it again whenever it dies. Return the last death when there are too many."""
        while True:
            assert self.process is not None, "it was started"
            death: ArealAgentError = await self.process.died()
            while True:
                if self._deaths.end():
                    await self.aclose()  # it may still live and serve later, or have left processes of its own
                    return ProcessDied(f"{MAX_DEATHS} deaths within {WITHIN_S:g} s of service; the last: {death}")
                logger.warning("%s; it is started again", str(death).partition(";")[0])
                await self.aclose()
                try:
                    await self.start()
                    break
                except (ProcessDied, EngineUnreachable) as error:
                    death = error

    async def aclose(self) -> None:
        """End its process. Harmless when it has ended."""
        if self.process is not None:
            await self._end(self.process)


class KeptServers:
    """The servers of one engine. Made by `keep_servers`."""

    def __init__(self, servers: Sequence[KeptServer]) -> None:
        self._servers = list(servers)
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by URL
        self._given_up_urls: set[str] = set()
        self._given_up: asyncio.Future[ArealAgentError] = asyncio.get_running_loop().create_future()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._servers)

    def process_ids(self) -> Mapping[str, int]:
        """Return the ids of the running processes, by name."""
        processes = [server.process for server in self._servers if server.process is not None]
        return {process.name: process.pid for process in processes}

    async def failure(self) -> ArealAgentError:
        """Wait until all servers have been given up; return the reason for the last one."""
        return await asyncio.shield(self._given_up)

    async def start(self) -> None:
        """Start all servers at once, and wait until all serve."""
        try:
            async with asyncio.TaskGroup() as group:
                for server in self._servers:
                    group.create_task(server.start())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._keepers = {
            server.url: asyncio.create_task(self._keep(server), name=server.url) for server in self._servers
        }

    async def stop(self, url: str) -> None:
        """End a server that is not wanted any more; one that was not started here is no error."""
        for server in [one for one in self._servers if one.url == url]:
            self._servers.remove(server)
            await self._end_keeper(url)
            await server.aclose()

    async def aclose(self) -> None:
        for url in list(self._keepers):
            await self._end_keeper(url)
        await asyncio.gather(*(server.aclose() for server in self._servers))  # each may take seconds to end

    async def _end_keeper(self, url: str) -> None:
        keeper = self._keepers.pop(url, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})

    async def _keep(self, server: KeptServer) -> None:
        try:
            death: ArealAgentError = await server.keep()
        except Exception as error:  # the boundary: a server that cannot be kept is given up, whatever the cause
            death = EngineUnreachable(f"the server at {server.url} could not be started again: {error!r}")
        logger.error("the server at %s is given up: %s", server.url, death)
        self._given_up_urls.add(server.url)
        if self._given_up_urls.issuperset(self.urls) and not self._given_up.done():
            self._given_up.set_result(death)


@asynccontextmanager
async def keep_servers(servers: Sequence[KeptServer]) -> AsyncGenerator[KeptServers]:
    """Start the servers; they are ended on leaving."""
    kept = KeptServers(servers)
    try:
        await kept.start()
        yield kept
    finally:
        await kept.aclose()
