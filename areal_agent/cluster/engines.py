"""The engine of a run, of whichever kind: servers that are started, or found running and given the run's weights.

While a run goes on, servers join and leave through `/rl/engines`; its URL and key are in files of the run's folder that
only their owner may read.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.hosts import LOCAL, Hosts
from areal_agent.cluster.servers import KeptServers, start_embedded, start_sglang, start_vllm
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.fleet.fleet import Fleet, MemberReport
from areal_agent.engine.fleet.member import MemberState
from areal_agent.engine.foreign.weight_folders import AdapterForm, begin_adapter
from areal_agent.errors import (
    ArealAgentError,
    ConfigError,
    EngineError,
    EngineUnreachable,
    ServerRefused,
    WeightUpdateError,
)
from areal_agent.files import replace_private
from areal_agent.gateway.auth import new_key
from areal_agent.gateway.engine_servers import EngineServers, serve_engine_servers
from areal_agent.process import beside, uninterrupted
from areal_agent.protocols import MemoryHolder
from areal_agent.trainer.checkpoint import ADAPTER
from areal_agent.trainer.config import TrainerConfig
from areal_agent.types import WeightVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningEngine:
    """A client, the address under which others connect, and the servers that were started for it.

    `memory` is released while a trainer trains, where the config asks for that.
    """

    client: Fleet
    address: EngineAddress
    servers: KeptServers | None = None  # each is started again when it dies
    memory: MemoryHolder | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all servers."""
        return tuple(report.url for report in self.client.report())

    async def survey(self) -> tuple[MemberReport, ...]:
        """Check every server and return its state."""
        return await self.client.survey()

    async def add(self, url: str) -> None:
        """Add a server that somebody else has started. Raises EngineError."""
        await self.client.add(url)

    async def remove(self, url: str) -> None:
        """Remove a server, and end it when this run started it. Raises EngineError."""
        await uninterrupted(self._remove(url))

    async def _remove(self, url: str) -> None:
        await self.client.remove(url)
        if self.servers is not None:
            await self.servers.stop(url)

    async def failure(self) -> ArealAgentError:
        """Wait until every server started here has been given up and there are no others; return the reason."""
        if self.servers is None:
            return await asyncio.get_running_loop().create_future()
        failure = await self.servers.failure()
        while not set(self.urls) <= set(self.servers.urls):
            await self.client.roster.changed()
        return failure


@asynccontextmanager
async def open_engine(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path, hosts: Hosts = LOCAL
) -> AsyncGenerator[RunningEngine]:
    """Open an engine that serves `model` as `version`. The servers that it starts are ended on leaving."""
    async with AsyncExitStack() as stack:
        if config.urls:
            fleet, address = await stack.enter_async_context(_connected(config, config.urls, hosts))
            await _take_over(fleet, config, model, version)
            yield RunningEngine(client=fleet, address=address)
            return
        start = {"embedded": start_embedded, "sglang": start_sglang, "vllm": start_vllm}[config.backend]
        servers = await stack.enter_async_context(start(config, model, version, logs, hosts))
        fleet, address = await stack.enter_async_context(_connected(config, servers.urls, hosts))
        if config.backend == "vllm":
            await fleet.pushes.load(model, version)  # so that the fleet can restore these weights
        else:
            fleet.pushes.begin_with(model, version)
        memory = await stack.enter_async_context(memory_of(fleet, address)) if config.release_kv else None
        await stack.enter_async_context(beside(follow_news(fleet, servers)))
        yield RunningEngine(client=fleet, address=address, servers=servers, memory=memory)


RETRY_S = 1.0


async def follow_news(fleet: Fleet, servers: KeptServers) -> None:
    """Take requests away from a server that has died; replace one that serves at another URL now; until cancelled.

    The new one gets the weights due before requests. The fleet itself would learn late of a machine that is cut off,
    whose servers do not refuse but are silent.
    """
    while True:
        old, new = await servers.news.get()
        if new is None:
            fleet.lose(old, "its process has ended, or its machine is lost")
            continue
        while new in servers.urls and new not in {report.url for report in fleet.report()}:
            try:
                await fleet.add(new)
            except EngineError as error:
                logger.warning("the server that moved to %s does not join yet: %s", new, error)
                await asyncio.sleep(RETRY_S)
        with contextlib.suppress(ServerRefused):  # somebody has removed it
            await fleet.remove(old)


@asynccontextmanager
async def _connected(
    config: EngineConfig, urls: tuple[str, ...], hosts: Hosts
) -> AsyncGenerator[tuple[Fleet, EngineAddress]]:
    address = EngineAddress(
        backend=config.backend,
        urls=urls,
        key=hosts.engine_key(config.backend),
        max_context_tokens=config.max_context_tokens,
        hung_after_s=config.hung_after_s,
        wait_s=config.wait_s,
    )
    fleet = address.connect()
    try:
        yield fleet, address
    finally:
        await fleet.aclose()


async def _take_over(fleet: Fleet, config: EngineConfig, model: Path, version: WeightVersion) -> None:
    """Give running servers the weights of this run. Raises ConfigError when one is missing or has another model."""
    try:
        await fleet.wait_ready(config.startup_timeout_s)
        await fleet.info()
        await fleet.pushes.load(model, version)
    except EngineError as error:
        raise ConfigError(f"engine.urls: {error}") from error


class _Memory:
    """A `MemoryHolder` over the embedded engines that still belong to the run."""

    def __init__(self, fleet: Fleet, engines: list[HttpEngine]) -> None:
        self._fleet = fleet
        self._engines = engines

    async def release_memory(self) -> None:
        """Release the memory of serving engines. One that died holds none; one that is not back yet takes none."""
        serving = self._urls(MemberState.SERVING)
        await asyncio.gather(*(_unless_gone(one.release_memory()) for one in self._engines if one.base_url in serving))

    async def resume_memory(self) -> None:
        """Resume all engines. One that failed meanwhile may come back later."""
        present = self._urls(*MemberState)
        await asyncio.gather(*(self._resume(one) for one in self._engines if one.base_url in present))

    async def _resume(self, engine: HttpEngine) -> None:
        try:
            await _unless_gone(engine.resume_memory())
        except EngineError:
            if engine.base_url in self._urls(MemberState.SERVING):
                raise

    def _urls(self, *states: MemberState) -> set[str]:
        return {report.url for report in self._fleet.report() if report.state in states}


async def _unless_gone(call: Awaitable[None]) -> None:
    """Ignore that a server is gone: the fleet notices by itself, and goes on with the others or once it is back."""
    with contextlib.suppress(EngineUnreachable):
        await call


@asynccontextmanager
async def memory_of(fleet: Fleet, address: EngineAddress) -> AsyncGenerator[MemoryHolder]:
    """Open a memory holder over the servers that were started here."""
    engines = [HttpEngine(url, key=address.key) for url in address.urls]
    try:
        yield _Memory(fleet, engines)
    finally:
        await asyncio.gather(*(engine.aclose() for engine in engines))


@asynccontextmanager
async def open_engine_control(servers: EngineServers, *, url_file: Path, key_file: Path) -> AsyncGenerator[None]:
    """Serve `/rl/engines` until left."""
    key = new_key()
    served = await serve_engine_servers(servers, key)
    try:
        replace_private(key_file, key)
        replace_private(url_file, served.base_url)
        yield
    finally:
        for file in (url_file, key_file):
            file.unlink(missing_ok=True)
        await served.aclose()


def engine_weights(config: TrainerConfig, model: Path, checkpoint: Path | None, folder: Path) -> Path:
    """Return the folder with which an engine starts in a run that began with `model` and goes on from `checkpoint`.

    It is a model, or adapters to apply to one. Adapters are written into `folder`, since servers may be started again
    long after. Raises ConfigError.
    """
    if config.lora is None or config.lora.push == "merged":
        return checkpoint or model
    form = AdapterForm(
        base=model, rank=config.lora.rank, alpha=config.lora.alpha, target_modules=config.lora.target_modules
    )
    try:
        return begin_adapter(folder / "begun_with", form, checkpoint / ADAPTER if checkpoint else None)
    except (OSError, WeightUpdateError) as error:
        raise ConfigError(f"trainer.lora.push is 'adapter', but no first adapters could be written: {error}") from error
