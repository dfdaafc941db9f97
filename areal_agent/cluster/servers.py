"""Starts servers of SGLang or vLLM on this machine, each kind in the environment that has it, and keeps them alive.

It knows processes and when they serve; what is theirs to know is said by `sglang.py` and `vllm.py`.
"""

import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from areal_agent.cluster.kept_server import KeptServer, KeptServers, keep_servers
from areal_agent.cluster.local import thread_variables, unless_it_dies
from areal_agent.engine.config import EngineConfig
from areal_agent.process import ManagedProcess


class ServerClient(Protocol):
    """What is asked of a server until it serves."""

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one kind of server is started."""

    launcher: Path  # run with the Python of the config
    options: Mapping[str, str]  # of all servers
    flags: Sequence[str]
    client: Callable[[str], ServerClient]  # by its URL
    variables: Callable[[int], Mapping[str, str]]  # of one server, by its number
    own_options: Callable[[int], Mapping[str, str]] = lambda _: {}  # the same; these come last, and count

    def command(self, config: EngineConfig, port: int, number: int) -> Sequence[str]:
        """Of the server with this number, which is to listen on this port of 127.0.0.1."""
        assert config.python is not None  # the config has seen to it
        place = {"--host": "127.0.0.1", "--port": str(port)}
        options, own_options = _words({**place, **self.options}), _words(self.own_options(number))
        return [config.python, str(self.launcher), *options, *self.flags, *config.server_args, *own_options]


def _words(options: Mapping[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


@asynccontextmanager
async def start_servers(config: EngineConfig, launch: Launch, logs: Path) -> AsyncGenerator[KeptServers]:
    """`config.num_servers` servers; kept alive, and ended on leaving."""
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
    """Return its URL when the server serves. Raises ProcessDied and EngineUnreachable."""
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
    """The port of the config, or free ones: no server takes a port that is open, so they are let go of again."""
    if config.port:
        return [config.port]
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(config.num_servers)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
