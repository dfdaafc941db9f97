"""The engine of a run, whichever kind it is: started, or found running and given the run's weights."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.kept_server import KeptServers
from areal_agent.cluster.local import start_engine
from areal_agent.cluster.sglang import start_sglang
from areal_agent.cluster.vllm import start_vllm
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.served import ServedEngine
from areal_agent.errors import ConfigError, EngineError
from areal_agent.process import ManagedProcess
from areal_agent.protocols import MemoryHolder
from areal_agent.types import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningEngine:
    """A client, where others find the same engine, and what was started for it.

    `memory` is what is to be released while a trainer trains, if anything.
    """

    client: ServedEngine
    address: EngineAddress
    processes: tuple[ManagedProcess, ...] = ()  # the death of one ends the run
    servers: KeptServers | None = None  # each is started again when it dies
    memory: MemoryHolder | None = None


@asynccontextmanager
async def open_engine(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AsyncGenerator[RunningEngine]:
    """An engine that serves `model` as `version`; what was started is ended on leaving."""
    if config.backend == "embedded":
        async with start_engine(config, model, version, logs) as (process, engine):
            address = EngineAddress(backend="embedded", urls=(engine.base_url,))
            memory = engine if config.release_kv else None
            yield RunningEngine(client=engine, address=address, processes=(process,), memory=memory)
    elif config.urls:
        async with _connected(config, config.urls) as (fleet, address):
            await _take_over(fleet, config, model, version)
            yield RunningEngine(client=fleet, address=address)
    elif config.backend == "vllm":
        async with (
            start_vllm(config, model, version, logs) as servers,
            _connected(config, servers.urls) as (fleet, address),
        ):
            await fleet.load(model, version)  # so that it knows from where they have them, and can put them back
            yield RunningEngine(client=fleet, address=address, servers=servers)
    else:
        async with (
            start_sglang(config, model, version, logs) as servers,
            _connected(config, servers.urls) as (fleet, address),
        ):
            fleet.begin_with(model, version)
            yield RunningEngine(client=fleet, address=address, servers=servers)


@asynccontextmanager
async def _connected(config: EngineConfig, urls: tuple[str, ...]) -> AsyncGenerator[tuple[Fleet, EngineAddress]]:
    address = EngineAddress(
        backend=config.backend,
        urls=urls,
        max_context_tokens=config.max_context_tokens,
        hung_after_s=config.hung_after_s,
        wait_s=config.wait_s,
    )
    fleet = address.fleet()
    try:
        yield fleet, address
    finally:
        await fleet.aclose()


async def _take_over(fleet: Fleet, config: EngineConfig, model: Path, version: WeightVersion) -> None:
    """Give servers that run already the weights of this run. Raises ConfigError when one is not there, or other."""
    try:
        await fleet.wait_ready(config.startup_timeout_s)
        await fleet.info()
        await fleet.load(model, version)
    except EngineError as error:
        raise ConfigError(f"engine.urls: {error}") from error
