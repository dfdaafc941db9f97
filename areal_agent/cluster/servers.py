"""Starts the servers of each kind, and starts them again when they die: on this machine at the URL where they were.

    start ─▶ serves ─▶ (its process dies) ─▶ start ...      three deaths within a minute of service: it is given up

Embedded engines run in this Python; SGLang and vLLM in the environment that has them (`engine.python`). Clients find
out by themselves that a server is back. One that had to be started on another host has another URL; `news` has deaths
and new URLs. When all servers are given up, the engine has failed.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from areal_agent.callback import Callback
from areal_agent.cluster.hosts import LOCAL, Host, Hosts, Process
from areal_agent.cluster.local import called, start_child, thread_variables, unless_it_dies
from areal_agent.engine.address import KEY_VARIABLE
from areal_agent.engine.config import EngineConfig, EnginePlan, visible_gpus
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.server import ForeignServer
from areal_agent.engine.foreign.weight_folders import AdapterForm, is_adapter, read_form
from areal_agent.engine.sglang import SGLANG_LAUNCHER
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.engine.vllm import ADAPTER_RANKS, VLLM_LAUNCHER
from areal_agent.engine.vllm.server import ADAPTER, VllmServer
from areal_agent.errors import ArealAgentError, EngineError, EngineUnreachable, ProcessDied
from areal_agent.types import WeightVersion

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
        start: Callable[[], Awaitable[Process]],
        serves: Callable[[Process], Awaitable[str]],
        end: Callable[[Process], Awaitable[None]],
    ) -> None:
        """`serves` returns the URL once the server serves, and raises ProcessDied or EngineUnreachable otherwise."""
        self.url = ""  # set once it has been started
        self.process: Process | None = None
        self._start = start
        self._serves = serves
        self._end = end
        self._deaths = DeathCount()

    async def start(self) -> None:
        """Start a process, and wait until it serves. Raises ProcessDied and EngineUnreachable."""
        self.process = await self._start()
        self.url = await self._serves(self.process)
        self._deaths.begin()

    async def keep(self, on_news: Callable[[str, str | None], None] = lambda old, new: None) -> ProcessDied:
        """Start it again whenever it dies. Return the last death when there are too many.

        `on_news` is given its URL and None when it dies, and its old and its new URL when it serves at another one.
        """
        while True:
            assert self.process is not None, "it was started"
            death: ArealAgentError = await self.process.died()
            on_news(self.url, None)
            while True:
                if self._deaths.end():
                    await self.aclose()  # it may still live and serve later, or have left processes of its own
                    return ProcessDied(f"{MAX_DEATHS} deaths within {WITHIN_S:g} s of service; the last: {death}")
                logger.warning("%s; it is started again", str(death).partition(";")[0])
                await self.aclose()
                old = self.url
                try:
                    await self.start()
                    if self.url != old:
                        on_news(old, self.url)
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
        self._keepers: dict[KeptServer, asyncio.Task[None]] = {}
        self.news: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()  # a URL, and the new one or None: it died
        self._given_up_urls: set[str] = set()
        self._given_up: asyncio.Future[ArealAgentError] = asyncio.get_running_loop().create_future()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(server.url for server in self._servers)

    def process_ids(self) -> Mapping[str, int]:
        """Return the ids of the processes that run on this machine, by name."""
        processes = [server.process for server in self._servers if server.process is not None]
        return {process.name: process.pid for process in processes if process.pid is not None}

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
        self._keepers = {server: asyncio.create_task(self._keep(server), name=server.url) for server in self._servers}

    async def stop(self, url: str) -> None:
        """End a server that is not wanted any more; one that was not started here is no error."""
        for server in [one for one in self._servers if one.url == url]:
            self._servers.remove(server)
            await self._end_keeper(server)
            await server.aclose()

    async def aclose(self) -> None:
        for server in list(self._keepers):
            await self._end_keeper(server)
        await asyncio.gather(*(server.aclose() for server in self._servers))  # each may take seconds to end

    async def _end_keeper(self, server: KeptServer) -> None:
        keeper = self._keepers.pop(server, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})

    async def _keep(self, server: KeptServer) -> None:
        try:
            death: ArealAgentError = await server.keep(on_news=lambda old, new: self.news.put_nowait((old, new)))
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


# ------------------------------------------------------------------------------------------------ embedded engines


def start_embedded(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path, hosts: Hosts = LOCAL
) -> AbstractAsyncContextManager[KeptServers]:
    """Start `config.num_servers` engines that serve `model` as `version`; kept alive, and ended on leaving."""
    places = [_EmbeddedPlace(config, model, version, logs, hosts, number) for number in range(config.num_servers)]
    return keep_servers([KeptServer(place.start, place.serves, _end) for place in places])


def engine_name(config: EngineConfig, number: int) -> str:
    """Return the name of the server with this number."""
    return "engine" if config.num_servers == 1 else f"engine {number}"


def _name_and_log(config: EngineConfig, logs: Path, number: int) -> tuple[str, Path]:
    """Return the name and the log file of the server with this number."""
    name = engine_name(config, number)
    return name, logs / f"{name.replace(' ', '-')}.log"


def _with(key: str | None) -> Mapping[str, str]:
    """Return the variable with the key that a server demands."""
    return {KEY_VARIABLE: key} if key else {}


class _EmbeddedPlace:
    """The place of one engine: on any free port at first, and there whenever it is started again on the same host."""

    def __init__(
        self, config: EngineConfig, model: Path, version: WeightVersion, logs: Path, hosts: Hosts, number: int
    ) -> None:
        self._timeout_s = config.startup_timeout_s
        self._name, self._log = _name_and_log(config, logs, number)
        self._hosts = hosts
        self._command = command_of(config, model, version)
        gpus = {} if hosts.chooses_gpus else visible_gpus(config, number, os.environ)
        self._variables = {**thread_variables(config.num_threads), **gpus, **_with(hosts.engine_key("embedded"))}
        self._host: Host | None = None
        self._config_port = self._port = config.port
        self._callback: Callback | None = None  # of the process started last

    async def start(self) -> Process:
        host = await self._hosts.host_for(self._name)
        if host is not self._host:  # its port may be taken on another one
            self._host, self._port = host, self._config_port
        command = [*self._command, "--host", host.address, "--port", str(self._port)]
        process, self._callback = await start_child(host, self._name, command, self._log, self._variables)
        return process

    async def serves(self, process: Process) -> str:
        """Return its URL, once it serves. Raises ProcessDied and EngineUnreachable."""
        assert self._callback is not None, "it was started"
        try:
            async with asyncio.timeout(self._timeout_s):
                url = await unless_it_dies(process, self._announced(process, self._callback))
        except TimeoutError:
            raise EngineUnreachable(
                f"the {self._name} did not serve within engine.startup_timeout_s = {self._timeout_s:g}; see {self._log}"
            ) from None
        self._port = urlsplit(url).port or 0
        return url

    @staticmethod
    async def _announced(process: Process, callback: Callback) -> str:
        """Return the URL with which the engine calls back."""
        try:
            reader, writer = await asyncio.open_connection(sock=await called(process, callback))
            with contextlib.closing(writer):
                return (await reader.readuntil()).decode().strip()
        except EOFError:
            raise await process.died() from None


def command_of(config: EngineConfig, model: Path, version: WeightVersion) -> Sequence[str]:
    """Return the command of each engine, without its address."""
    options = {
        "--model": str(model),
        "--device": config.device,
        "--dtype": config.dtype,
        "--threads": str(config.num_threads),
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
    return [sys.executable, "-m", "areal_agent.engine", *_words(options)]


# ------------------------------------------------------------------------------------------------ SGLang and vLLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The command, variables and client of one kind of server."""

    launcher: Path  # run with the Python of the config
    options: Mapping[str, str]  # of all servers
    flags: Sequence[str]
    client: type[ForeignServer]
    variables: Callable[[int], Mapping[str, str]]  # of one server, by its number
    own_options: Callable[[int], Mapping[str, str]] = lambda _: {}  # of one server; they come last and win
    begins_with: tuple[Path, WeightVersion] | None = None  # weights that it gets once it serves

    def command(self, config: EngineConfig, address: str, port: int, number: int) -> Sequence[str]:
        """Return the command of the server with this number, listening there."""
        assert config.python is not None  # checked by Config
        options = _words({"--host": address, "--port": str(port), **self.options})
        own_options = _words(self.own_options(number))
        return [config.python, str(self.launcher), *options, *self.flags, *config.server_args, *own_options]


def programs_of(config: EngineConfig) -> Sequence[str]:
    """Return the files with which SGLang's or vLLM's servers are started, and which their machines have to have."""
    if config.python is None:
        return ()
    launcher = SGLANG_LAUNCHER if config.backend == "sglang" else VLLM_LAUNCHER
    return os.path.abspath(shutil.which(config.python) or config.python), str(launcher)


def _words(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def start_servers(
    config: EngineConfig, launch: Launch, logs: Path, hosts: Hosts
) -> AbstractAsyncContextManager[KeptServers]:
    """Start `config.num_servers` servers; they are kept alive, and ended on leaving."""
    taken: set[int] = set()
    places = [_ForeignPlace(config, launch, logs, hosts, number, taken) for number in range(config.num_servers)]
    return keep_servers([KeptServer(place.start, place.serves, _end) for place in places])


class _ForeignPlace:
    """The place of one server, on a port that was free when it was first started on the same host.

    `taken` are the ports that were chosen for all servers.
    """

    def __init__(
        self, config: EngineConfig, launch: Launch, logs: Path, hosts: Hosts, number: int, taken: set[int]
    ) -> None:
        self._config = config
        self._launch = launch
        self._hosts = hosts
        self._number = number
        self._taken = taken
        self._name, self._log = _name_and_log(config, logs, number)
        self._key = hosts.engine_key(config.backend)
        self._variables = {**thread_variables(config.num_threads), **launch.variables(number), **_with(self._key)}
        self._host: Host | None = None
        self._port = 0

    async def start(self) -> Process:
        host = await self._hosts.host_for(self._name)
        if host is not self._host:
            self._host, self._port = host, self._config.port or await self._free_port(host)
        command = self._launch.command(self._config, host.address, self._port, self._number)
        return await host.start(self._name, command, log_path=self._log, env=self._variables)

    async def serves(self, process: Process) -> str:
        assert self._host is not None, "it was started"
        address = self._host.address
        url = f"http://{f'[{address}]' if ':' in address else address}:{self._port}"
        async with contextlib.aclosing(ForeignEngine(self._launch.client(url, key=self._key))) as engine:
            serving = wait_until_it_serves(engine, self._launch.begins_with, self._config.startup_timeout_s)
            await unless_it_dies(process, serving)
        return url

    async def _free_port(self, host: Host) -> int:
        while (port := await host.free_port()) in self._taken:
            pass
        self._taken.add(port)
        return port


async def wait_until_it_serves(
    engine: ForeignEngine, weights: tuple[Path, WeightVersion] | None, timeout_s: float
) -> None:
    """Wait until a server serves, and give it these weights. Raises EngineUnreachable when it does not."""
    await engine.wait_ready(timeout_s)
    try:
        if weights is not None:
            await engine.load(*weights)
    except EngineError as error:
        raise EngineUnreachable(f"the server at {engine.base_url} serves but refuses weights: {error}") from error


async def _end(process: Process) -> None:
    """End the server with all its processes, which are a session of their own."""
    await process.aclose(with_session=True)


CONTEXT_MARGIN = 8
"""Added to the context length given to SGLang, which cuts requests off a few tokens before its end."""


def start_sglang(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path, hosts: Hosts = LOCAL
) -> AbstractAsyncContextManager[KeptServers]:
    """Start `config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving."""
    launch = Launch(
        launcher=SGLANG_LAUNCHER,
        options=_sglang_options(config, model, version),
        flags=("--skip-server-warmup", "--incremental-streaming-output"),
        own_options=lambda number: {} if hosts.chooses_gpus else _gpus(config, number),
        client=SglangServer,
        variables=lambda _: {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )
    return start_servers(config, launch, logs, hosts)


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
    return options | _dtype(config)


def _dtype(config: EngineConfig) -> dict[str, str]:
    return {} if config.dtype == "auto" else {"--dtype": config.dtype}


def _gpus(config: EngineConfig, number: int) -> dict[str, str]:
    plan = EnginePlan.of(config)
    return {"--base-gpu-id": str(plan.first_gpu_of(number))} if plan.is_spread or config.first_gpu else {}


MAX_LOGPROBS = 32
"""Log-probabilities per token: one more than is asked for, and a gateway hands out 20."""

BLOCK_TOKENS = 32
"""The block size of the KV cache where `kv_tokens` sets its size: a CPU needs multiples of it, a GPU accepts it."""

FLAGS = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")


def start_vllm(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path, hosts: Hosts = LOCAL
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
        client=VllmServer,
        begins_with=(model, version),  # also after each restart: vLLM has no flag for the version
        variables=lambda number: {} if hosts.chooses_gpus else visible_gpus(config, number, os.environ),
    )
    return start_servers(config, launch, logs, hosts)


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
    return options | _dtype(config)


def _adapter_options(config: EngineConfig, adapters: Path, form: AdapterForm) -> dict[str, str]:
    return {
        **_vllm_options(config, form.base),
        "--max-lora-rank": str(next(rank for rank in ADAPTER_RANKS if rank >= form.rank)),
        "--lora-modules": f"{ADAPTER}={os.path.abspath(adapters)}",
    }
