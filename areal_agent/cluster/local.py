"""Starts the rollout workers, and what a run needs on this machine: ports, addresses, folders.

The model's folder is one that the config names, one of the hub, or that of the tiny model, built when needed.

The folder in which a run hands over weights is removed with the run. A killed run's folder is removed by the next run:
its process is gone, by the number in the folder's name, and nobody holds a lock on it. The lock is needed because
containers may share memory without seeing each other's processes.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from areal_agent.callback import Callback
from areal_agent.cluster.hosts import LOCAL, Host, Hosts, Process
from areal_agent.errors import ConfigError
from areal_agent.files import no_device, require_no_gguf
from areal_agent.ledger.shard import LedgerShard
from areal_agent.models.recipe import RECIPE, demonstrations_of, model_folder
from areal_agent.observe.progress import Progress
from areal_agent.process import ManagedProcess
from areal_agent.rollout.tasks import HUB_NAME
from areal_agent.rollout.worker_client import Channel, WorkerClient, WorkerGone, WorkerSettings

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


async def unless_it_dies(process: Process, ready: Awaitable[Result]) -> Result:
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


async def start_child(
    host: Host, name: str, argv: Sequence[str], log_path: Path, variables: Mapping[str, str]
) -> tuple[Process, Callback]:
    """Start a process that will call back."""
    callback = Callback(host.home)
    try:
        process = await host.start(
            name, [*argv, *callback.options], log_path=log_path, env={**variables, **callback.variables}
        )
    except BaseException:
        callback.close()
        raise
    return process, callback


async def called(process: Process, callback: Callback) -> socket.socket:
    """Wait for the call of a process. Raises EOFError when it ends before."""
    return await asyncio.to_thread(callback.accept, lambda: process.is_running)


@asynccontextmanager
async def start_worker(
    settings: WorkerSettings, logs: Path, on_warning: Callable[[str], None], hosts: Hosts = LOCAL
) -> AsyncGenerator[tuple[Process, WorkerClient]]:
    """Start a rollout worker and wait until it takes calls; it is ended on leaving."""
    name, log_path = f"worker {settings.number}", logs / f"worker-{settings.number}.log"
    argv = [sys.executable, "-m", "areal_agent.rollout.worker"]
    process, callback = await start_child(await hosts.host_for(name), name, argv, log_path, thread_variables(1))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(process.aclose)
        shard = None
        if settings.is_elsewhere:
            shard = await LedgerShard.open(settings.shard, create=True)
            stack.push_async_callback(shard.aclose)
        try:
            client = WorkerClient(await Channel.over(await called(process, callback)), on_warning, shard)
            stack.push_async_callback(client.aclose)
            await unless_it_dies(process, client.start(settings))
        except (EOFError, WorkerGone):  # it is dead, or it closed its end and is about to die
            raise await process.died() from None
        yield process, client


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
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=parent) as name, locked(Path(name)):
        yield Path(name)


def _is_abandoned(folder: Path) -> bool:
    owner = folder.name.removeprefix(PREFIX).partition("-")[0]
    if not owner.isdigit() or _is_alive(int(owner)):
        return False
    try:
        with locked(folder):
            return True
    except OSError:  # somebody holds the lock, or the folder is another user's
        return False


@contextmanager
def locked(folder: Path) -> Generator[None]:
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


POLL_S = 0.25
WEIGHTS = "*.safetensors"
TOKENIZER = "tokenizer.json"
HUB_FILES = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt")  # no pickles, no code


def require_model(model: str, what: str = "model") -> None:
    """Raise ConfigError unless `model` is a Hugging Face folder, `tiny`, or has the form of a hub name."""
    path = Path(model)
    require_no_gguf(model, what)
    if demonstrations_of(model) is not None or (path / "config.json").is_file():
        return
    if path.exists():
        raise ConfigError(f"{what} {model!r} is not a Hugging Face folder: it has no config.json")
    if not HUB_NAME.fullmatch(model):
        raise ConfigError(f"{what} {model!r}: there is no such folder; give a folder, a hub name (org/name) or 'tiny'")


def is_described(path: Path) -> bool:
    """Return whether this is a folder with a config.json, or that file."""
    return path.is_file() or (path / "config.json").is_file()


def read_described(path: Path) -> dict[str, Any]:
    """Return the config.json of a folder, or of that file under whatever name. Raises ConfigError."""
    try:
        described: object = json.loads(no_device(path if path.is_file() else path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model {str(path)!r}: its config.json cannot be read: {error}") from None
    if not isinstance(described, dict):
        raise ConfigError(f"model {str(path)!r}: its config.json is {described!r:.100}, and no object")
    return cast(dict[str, Any], described)


async def obtain_model(model: str, seed: int, logs: Path, progress: Progress) -> Path:
    """Return the Hugging Face folder of `model`.

    Raises ConfigError when it is not on the hub, ProcessDied when building fails.
    """
    if (demonstrations := demonstrations_of(model)) is not None:
        return await _tiny(seed, demonstrations, logs, progress)
    if (Path(model) / "config.json").is_file():
        return Path(model)
    progress.phase(f"downloading {model}")
    return await _download(model, HUB_FILES)


async def describe_model(model: str, seed: int) -> Path | None:
    """Return a folder with the config and tokenizer of `model`, and with weights only where they are here already.

    None for a tiny model that is not built yet. Raises ConfigError when the hub does not have the model.
    """
    if (demonstrations := demonstrations_of(model)) is not None:
        folder = await asyncio.to_thread(model_folder, RECIPE, seed, demonstrations)
        return folder if (folder / "config.json").is_file() else None
    if (Path(model) / "config.json").is_file():
        return Path(model)
    return await _download(model, [pattern for pattern in HUB_FILES if pattern != WEIGHTS])


async def _download(model: str, patterns: Iterable[str]) -> Path:
    try:
        return Path(await asyncio.to_thread(snapshot_download, model, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        cause = str(error).splitlines()[0]
        raise ConfigError(
            f"model {model!r}: there is no such folder, and it cannot be downloaded from the hub: {cause}; name a "
            "Hugging Face folder, or a model of the hub (org/name) that this machine can reach or has downloaded"
        ) from None


def require_same_tokenizer(model: Path, checkpoint: Path) -> None:
    """Raise ConfigError unless a checkpoint was trained with the tokenizer of `model`."""
    ours, theirs = model / TOKENIZER, checkpoint / TOKENIZER
    if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
        raise ConfigError(
            f"cannot resume: the tokenizer of model {str(model)!r} is not the one that the checkpoint "
            f"{str(checkpoint)!r} was trained with; resume with the model (and seed) that the run began with"
        )


async def _tiny(seed: int, demonstrations: str, logs: Path, progress: Progress) -> Path:
    """Build the tiny model in a process of its own, so that torch stays out of this one.

    It uses one thread: a small model gains little from a second, and loses much when another program wants that core.
    """
    folder = await asyncio.to_thread(model_folder, RECIPE, seed, demonstrations)
    if (folder / "config.json").is_file():
        return folder
    progress.phase("building the tiny model")
    argv = [sys.executable, "-m", "areal_agent.models.tiny", "--out", str(folder), "--seed", str(seed)]
    argv += ["--threads", "1", "--demonstrations", demonstrations]
    process = await ManagedProcess.start("model building", argv, log_path=logs / "model.log")
    try:
        while process.is_running:
            await asyncio.sleep(POLL_S)
            fraction, text = read_progress(process.log_tail(1))
            progress.phase_progress(fraction, text)
        if not (folder / "config.json").is_file():
            raise await process.died()
    finally:
        await process.aclose()
    return folder


def read_progress(line: str) -> tuple[float, str]:
    """Read `42% warm start, step 130`; a line of another form means no progress.

    >>> read_progress("42% warm start"), read_progress("Loading")
    ((0.42, 'warm start'), (0.0, ''))
    """
    number, percent, text = line.strip().partition("%")
    return (int(number) / 100, text.strip()) if percent and number.isdigit() else (0.0, "")
