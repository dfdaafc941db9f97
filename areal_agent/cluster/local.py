"""Starts the trainer and the rollout workers of a run on this machine, and what all of its processes share.

It knows how they are started and when they are ready, not what they are used for.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from areal_agent.errors import ConfigError
from areal_agent.process import ManagedProcess
from areal_agent.rollout.worker.client import WorkerClient, WorkerGone
from areal_agent.rollout.worker.messages import WorkerSettings
from areal_agent.trainer.client import TrainerClient

Result = TypeVar("Result")


def check_port(port: int, what: str) -> None:
    """Raise ConfigError when a fixed port of 127.0.0.1 is in use; 0 always passes."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"{what} = {port}: the port cannot be used ({error.strerror}); choose another, or 0 for any free one"
            ) from None


async def unless_it_dies(process: ManagedProcess, ready: Awaitable[Result]) -> Result:
    """Await `ready`; raises ProcessDied when the process ends first."""
    waiting = asyncio.ensure_future(ready)
    dying = asyncio.ensure_future(process.died())
    try:
        await asyncio.wait({waiting, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise dying.result()
        return waiting.result()
    finally:
        for future in (waiting, dying):
            future.cancel()
        await asyncio.gather(waiting, dying, return_exceptions=True)


@asynccontextmanager
async def start_trainer(num_threads: int, logs: Path) -> AsyncGenerator[tuple[ManagedProcess, TrainerClient]]:
    """A trainer process, connected but not initialised; ended on leaving."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        argv = [sys.executable, "-m", "areal_agent.trainer", "--fd", str(theirs.fileno())]
        process = await ManagedProcess.start(
            "trainer",
            argv,
            log_path=logs / "trainer.log",
            env=thread_variables(num_threads),
            pass_fds=[theirs.fileno()],
        )
    client = TrainerClient(ours)
    try:
        yield process, client
    finally:
        await client.aclose()
        await process.aclose()


@asynccontextmanager
async def start_worker(
    settings: WorkerSettings, logs: Path, on_warning: Callable[[str], None]
) -> AsyncGenerator[tuple[ManagedProcess, WorkerClient]]:
    """A rollout worker that takes calls; ended on leaving."""
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs):
        argv = [sys.executable, "-m", "areal_agent.rollout.worker", "--fd", str(theirs.fileno())]
        process = await ManagedProcess.start(
            f"worker {settings.number}",
            argv,
            log_path=logs / f"worker-{settings.number}.log",
            env=thread_variables(1),
            pass_fds=[theirs.fileno()],
        )
    client = WorkerClient(ours, on_warning)
    try:
        try:
            await unless_it_dies(process, client.start(settings))
        except WorkerGone:  # it closed its end, so it is about to die
            raise await process.died() from None
        yield process, client
    finally:
        await client.aclose()
        await process.aclose()


def thread_variables(num_threads: int) -> dict[str, str]:
    """Two processes that each use all cores are many times slower than one thread each: the number is explicit."""
    return {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} | {
        "TOKENIZERS_PARALLELISM": "false",
    }
