"""Starts the servers of each kind on this machine: embedded engines, SGLang and vLLM.

Embedded engines run in this Python; SGLang and vLLM in the environment that has them (`engine.python`). All are kept
alive (kept_server.py), and ended on leaving.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from areal_agent.cluster.kept_server import KeptServer, KeptServers, keep_servers
from areal_agent.cluster.local import thread_variables, unless_it_dies
from areal_agent.engine.config import EngineConfig, EnginePlan, visible_gpus
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.weight_folders import AdapterForm, is_adapter, read_form
from areal_agent.engine.sglang import SGLANG_LAUNCHER
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.engine.vllm import ADAPTER_RANKS, VLLM_LAUNCHER
from areal_agent.engine.vllm.server import ADAPTER, VllmServer
from areal_agent.errors import EngineError, EngineUnreachable
from areal_agent.process import ManagedProcess
from areal_agent.types import WeightVersion


class ServerClient(Protocol):
    """The calls on a server until it serves."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The command, variables and client of one kind of server."""

    launcher: Path  # run with the Python of the config
    options: Mapping[str, str]  # of all servers
    flags: Sequence[str]
    client: Callable[[str], ServerClient]  # makes the client of a URL
    variables: Callable[[int], Mapping[str, str]]  # of one server, by its number
    own_options: Callable[[int], Mapping[str, str]] = lambda _: {}  # of one server; they come last and win

    def command(self, config: EngineConfig, port: int, number: int) -> Sequence[str]:
        """Return the command of the server with this number, listening on this port of 127.0.0.1."""
        assert config.python is not None  # checked by Config
        place = {"--host": "127.0.0.1", "--port": str(port)}
        options, own_options = _words({**place, **self.options}), _words(self.own_options(number))
        return [config.python, str(self.launcher), *options, *self.flags, *config.server_args, *own_options]


def _words(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


@asynccontextmanager
async def start_servers(config: EngineConfig, launch: Launch, logs: Path) -> AsyncGenerator[KeptServers]:
    """Start `config.num_servers` servers; they are kept alive, and ended on leaving."""
    ports = _choose_ports(config)
    servers: list[KeptServer] = []
    for number, port in enumerate(ports):
        url = f"http://127.0.0.1:{port}"
        name = "engine" if len(ports) == 1 else f"engine {number}"
        servers.append(
            KeptServer(
                start=partial(
                    _start, name, launch.command(config, port, number), logs, _variables(config, launch, number)
                ),
                serves=partial(_serves, url, launch.client, config.startup_timeout_s),
                end=_end,
            )
        )
    async with keep_servers(servers) as kept:
        yield kept


def _variables(config: EngineConfig, launch: Launch, number: int) -> dict[str, str]:
    return {**thread_variables(config.threads), **launch.variables(number)}


async def _start(name: str, command: Sequence[str], logs: Path, variables: Mapping[str, str]) -> ManagedProcess:
    log_path = logs / f"{name.replace(' ', '-')}.log"
    return await ManagedProcess.start(name, command, log_path=log_path, env=variables)


async def _serves(url: str, connect: Callable[[str], ServerClient], timeout_s: float, process: ManagedProcess) -> str:
    """Return the server's URL once it serves. Raises ProcessDied and EngineUnreachable."""
    client = connect(url)
    try:
        await unless_it_dies(process, client.wait_ready(timeout_s))
    finally:
        await client.aclose()
    return url


async def _end(process: ManagedProcess) -> None:
    """End the server with all its processes, which are a session of their own."""
    await process.aclose()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _choose_ports(config: EngineConfig) -> list[int]:
    """Return the config's port, or free ones. Probes are closed again, for no server can use a port that is open."""
    if config.port:
        return [config.port]
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(config.num_servers)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


POLL_S = 0.05


def start_embedded(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """Start `config.num_servers` engines that serve `model` as `version`; kept alive, and ended on leaving."""
    places = [_Place(config, model, version, logs, number) for number in range(config.num_servers)]
    return keep_servers([KeptServer(place.start, place.serves, ManagedProcess.aclose) for place in places])


class _Place:
    """The place of one engine: on any free port at first, and on that port whenever it is started again."""

    def __init__(self, config: EngineConfig, model: Path, version: WeightVersion, logs: Path, number: int) -> None:
        self._config = config
        self._name = "engine" if config.num_servers == 1 else f"engine {number}"
        self._log = logs / f"{self._name.replace(' ', '-')}.log"
        self._announcement = self._log.with_suffix(".url")
        self._command = command_of(config, model, version)
        self._variables = thread_variables(config.threads) | visible_gpus(config, number, os.environ)
        self._port = config.port

    async def start(self) -> ManagedProcess:
        self._announcement.unlink(missing_ok=True)
        command = [*self._command, "--port", str(self._port), "--announce", str(self._announcement)]
        return await ManagedProcess.start(self._name, command, log_path=self._log, env=self._variables)

    async def serves(self, process: ManagedProcess) -> str:
        """Return its URL, once it serves. Raises ProcessDied and EngineUnreachable."""
        url = await unless_it_dies(process, self._announced())
        self._port = urlsplit(url).port or 0
        return url

    async def _announced(self) -> str:
        limit_s = self._config.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not self._announcement.exists():  # noqa: ASYNC110 (a file has no event)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineUnreachable(
                f"the {self._name} did not serve within engine.startup_timeout_s = {limit_s:g}; see {self._log}"
            ) from None
        return self._announcement.read_text()


def command_of(config: EngineConfig, model: Path, version: WeightVersion) -> Sequence[str]:
    """Return the command of each engine, without the port."""
    options = {
        "--model": str(model),
        "--device": config.device,
        "--threads": str(config.threads),
        "--weight-version": str(version),
        "--max-running": str(config.max_running_requests),
        "--max-context": str(config.max_context_tokens),
        "--sharing": str(EnginePlan.of(config).num_sharing),
        "--drain": "0",  # when a run ends, nobody waits for answers
    }
    if config.kv_tokens is not None:
        options["--kv-tokens"] = str(config.kv_tokens)
    if config.leave_gib is not None:
        options["--leave-gib"] = str(config.leave_gib)
    words = (word for pair in options.items() for word in pair)
    return [sys.executable, "-m", "areal_agent.engine", *words]


CONTEXT_MARGIN = 8
"""Added to the context length given to SGLang, which cuts requests off a few tokens before its end."""


def start_sglang(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """Start `config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving."""
    launch = Launch(
        launcher=SGLANG_LAUNCHER,
        options=_sglang_options(config, model, version),
        flags=("--skip-server-warmup", "--incremental-streaming-output"),
        own_options=lambda number: _gpus(config, number),
        client=lambda url: ForeignEngine(SglangServer(url)),
        variables=lambda _: {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )
    return start_servers(config, launch, logs)


def _sglang_options(config: EngineConfig, model: Path, version: WeightVersion) -> dict[str, str]:
    options = {
        "--model-path": os.path.abspath(model),
        "--weight-version": str(version),
        "--context-length": str(config.max_context_tokens + CONTEXT_MARGIN),
        "--max-running-requests": str(config.max_running_requests),
    }
    if config.kv_tokens is not None:
        options["--max-total-tokens"] = str(config.kv_tokens)
    if config.device != "auto":
        options["--device"] = config.device
    return options


def _gpus(config: EngineConfig, number: int) -> dict[str, str]:
    plan = EnginePlan.of(config)
    return {"--base-gpu-id": str(plan.first_gpu_of(number))} if plan.is_spread or config.first_gpu else {}


MAX_LOGPROBS = 32
"""Log-probabilities per token: one more than is asked for, and a gateway hands out 20."""

BLOCK_TOKENS = 32
"""The block size of the KV cache where `kv_tokens` sets its size: a CPU needs multiples of it, a GPU accepts it."""

FLAGS = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")


class StartedServer:
    """A server that gets its version once it serves, also after each restart: vLLM has no flag for it."""

    def __init__(self, engine: ForeignEngine, model: Path, version: WeightVersion) -> None:
        self._engine = engine
        self._model = model
        self._version = version

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves `model` as `version`. Raises EngineUnreachable when it does not."""
        await self._engine.wait_ready(timeout_s)
        try:
            await self._engine.load(self._model, self._version)
        except EngineError as error:
            raise EngineUnreachable(f"the vLLM server serves but refuses weights: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._engine.aclose()


def start_vllm(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """Start `config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving.

    `model` may be a folder of adapters: the servers then apply them to their base model, and accept pushes of adapters
    only.
    """
    form = read_form(model) if is_adapter(model) else None
    launch = Launch(
        launcher=VLLM_LAUNCHER,
        options=_vllm_options(config, model) if form is None else _adapter_options(config, model, form),
        flags=(*FLAGS, *(("--enable-lora",) if form else ())),
        client=lambda url: StartedServer(ForeignEngine(VllmServer(url)), model, version),
        variables=lambda number: visible_gpus(config, number, os.environ),
    )
    return start_servers(config, launch, logs)


def _vllm_options(config: EngineConfig, model: Path) -> dict[str, str]:
    options = {
        "--model": os.path.abspath(model),
        "--max-model-len": str(config.max_context_tokens),
        "--max-num-seqs": str(config.max_running_requests),
        "--max-logprobs": str(MAX_LOGPROBS),
        "--generation-config": "vllm",
    }
    if config.kv_tokens is not None:
        num_blocks = -(-config.kv_tokens // BLOCK_TOKENS) + 1  # vLLM reserves one block as the null block
        options |= {"--block-size": str(BLOCK_TOKENS), "--num-gpu-blocks-override": str(num_blocks)}
    return options


def _adapter_options(config: EngineConfig, adapters: Path, form: AdapterForm) -> dict[str, str]:
    return {
        **_vllm_options(config, form.base),
        "--max-lora-rank": str(next(rank for rank in ADAPTER_RANKS if rank >= form.rank)),
        "--lora-modules": f"{ADAPTER}={os.path.abspath(adapters)}",
    }
