"""Rollout workers over a real engine in this process, whose pause holds rollouts in mid-answer."""

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest_asyncio

from areal_agent.cluster.hosts import LOCAL, LOOPBACK, Hosts
from areal_agent.cluster.workers import WorkerPool, open_workers, shard_name
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.client import HttpEngine
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.config import RolloutConfig, SandboxConfig
from areal_agent.rollout.local import LocalSettings
from areal_agent.rollout.worker_client import WorkerSettings
from tests.histories import open_ledger


@asynccontextmanager
async def serving(
    model: Path, *, num_slots: int = 8, max_context_tokens: int = 128, **options: Any
) -> AsyncGenerator[EngineServer]:
    """Open an embedded engine's server in this process."""
    sizes = {"num_slots": num_slots, "max_context_tokens": max_context_tokens}
    runner = ModelRunner(str(model), device="cpu", dtype="float32", **sizes)
    server = await EngineServer.start(runner, **options)
    try:
        yield server
    finally:
        await server.aclose()


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """A pool of workers, and what they work with."""

    pool: WorkerPool
    ledger: Ledger
    engine: HttpEngine
    logs: Path


def of_runs(process_ids: Iterable[int]) -> set[int]:
    """Return those of our own commands, without Ray's processes and others."""
    return {one for one in process_ids if any("areal_agent." in word for word in psutil.Process(one).cmdline())}


def until_ended(process_ids: set[int]) -> None:
    """Wait until none of the processes is left; only a hang is longer than the limit."""
    psutil.wait_procs([psutil.Process(one) for one in process_ids if psutil.pid_exists(one)], timeout=120.0)
    assert not any(map(psutil.pid_exists, process_ids))


collect_ignore = ["agents.py"]  # what the workers import; no test


@asynccontextmanager
async def crews(folder: Path, small_model: Path) -> AsyncGenerator[Callable[..., Awaitable[Crew]]]:
    """Yield a function that makes one in a folder, until the end."""
    async with AsyncExitStack() as stack:
        ledger = await stack.enter_async_context(open_ledger(folder))

        async def make(
            workflow: str, *, is_elsewhere: bool = False, hosts: Hosts = LOCAL, home: str = LOOPBACK, **values: object
        ) -> Crew:
            server = await stack.enter_async_context(serving(small_model, host=home))
            engine = HttpEngine(server.base_url)
            stack.push_async_callback(engine.aclose)
            info = await engine.info()
            config = RolloutConfig.model_validate({"max_tokens": 8, "block_warn_s": 0.1, **values})
            settings = [
                WorkerSettings(
                    number=number,
                    workflow=f"agents:{workflow}",
                    sys_path=(*sys.path, str(Path(__file__).parent)),
                    engine=EngineAddress(backend="embedded", urls=(server.base_url,)),
                    info=info,
                    shard=str(ledger.shard_path(shard_name(number))),
                    is_elsewhere=is_elsewhere,
                    local=LocalSettings(
                        model_name="m",
                        tokenizer=small_model,
                        port=0,
                        max_concurrent=num_slots,
                        rollout=config,
                        sandbox=SandboxConfig(),
                    ),
                )
                for number, num_slots in enumerate(config.slots)
            ]
            pool = await stack.enter_async_context(open_workers(settings, ledger, folder, hosts))
            return Crew(pool=pool, ledger=ledger, engine=engine, logs=folder)

        yield make


@pytest_asyncio.fixture
async def make_crew(tmp_path: Path, small_model: Path) -> AsyncGenerator[Callable[..., Awaitable[Crew]]]:
    """`await make_crew("solve", workers=2, max_concurrent=4)`. The engine listens at the address `home`."""
    async with crews(tmp_path, small_model) as make:
        yield make
