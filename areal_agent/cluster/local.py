"""The trainer and the rollout workers as processes of this machine, and what they need: ports, hosts, a weights folder.

The folder in which a run hands over weights is removed with the run. A killed run's folder is removed by the next run:
its process is gone, by the number in the folder's name, and nobody holds a lock on it. The lock is needed because
containers may share memory without seeing each other's processes.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from areal_agent.errors import ConfigError
from areal_agent.process import ManagedProcess
from areal_agent.rollout.worker_client import Channel, WorkerClient, WorkerGone, WorkerSettings
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
    """Await `ready`. Raises ProcessDied when the process ends first."""
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
    """Start a trainer process and connect to it; it is ended on leaving. Its model is not loaded yet."""
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
    """Start a rollout worker and wait until it takes calls; it is ended on leaving."""
    ours, theirs = socket.socketpair()
    client = WorkerClient(await Channel.over(ours), on_warning)
    with contextlib.closing(theirs):
        argv = [sys.executable, "-m", "areal_agent.rollout.worker", "--fd", str(theirs.fileno())]
        process = await ManagedProcess.start(
            f"worker {settings.number}",
            argv,
            log_path=logs / f"worker-{settings.number}.log",
            env=thread_variables(1),
            pass_fds=[theirs.fileno()],
        )
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
    """Return the variables that set a process's threads: two processes on all cores are far slower than on one each."""
    return {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} | {
        "TOKENIZERS_PARALLELISM": "false",
    }


def check_this_host(url: str, what: str) -> None:
    """Raise ConfigError unless `url` leads to this machine, so that its processes can read this machine's memory."""
    name = urlsplit(url).hostname or ""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"{what} = {url}: the host {name!r} cannot be found ({error}); check the name") from None
    if not any(_is_own(address) for address in addresses):
        raise ConfigError(
            f"{what} = {url}: {name!r} is another machine, but weights are handed over in shared memory; run the "
            "trainer on the machine of the engine"
        )


def _is_own(address: str) -> bool:
    """Return whether a socket can be bound to the address, which works only for addresses of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


MEMORY = Path("/dev/shm")
PREFIX = "areal_agent-"


@contextmanager
def weights_folder(*, in_memory: bool) -> Generator[Path]:
    """Make a private folder, in memory (/dev/shm) if asked for and available; it is removed on leaving."""
    has_memory = in_memory and os.access(MEMORY, os.W_OK)
    with folder_in(MEMORY if has_memory else Path(tempfile.gettempdir())) as folder:
        yield folder


@contextmanager
def folder_in(parent: Path) -> Generator[Path]:
    """Make a private folder in `parent`, after removing those that killed runs left there."""
    for leftover in parent.glob(f"{PREFIX}*"):
        if _is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=parent) as name, _locked(Path(name)):
        yield Path(name)


def _is_abandoned(folder: Path) -> bool:
    owner = folder.name.removeprefix(PREFIX).partition("-")[0]
    if not owner.isdigit() or _is_alive(int(owner)):
        return False
    try:
        with _locked(folder):
            return True
    except OSError:  # somebody holds the lock, or the folder is another user's
        return False


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold an exclusive lock. Raises OSError when somebody else does; a file system without locks counts as free."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(fd)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
