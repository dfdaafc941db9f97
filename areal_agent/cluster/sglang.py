"""Starts SGLang servers on this machine, in the environment that has SGLang. It knows their arguments, not the wire."""

import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from areal_agent.cluster.kept_server import KeptServer, KeptServers, keep_servers
from areal_agent.cluster.local import thread_variables, unless_it_dies
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.gpus import EnginePlan
from areal_agent.engine.sglang import LAUNCHER
from areal_agent.engine.sglang.engine import SglangEngine
from areal_agent.process import ManagedProcess
from areal_agent.types import WeightVersion

CONTEXT_MARGIN = 8
"""SGLang cuts requests off a few tokens before the end of its context: it is given so much more than is used."""


@asynccontextmanager
async def start_sglang(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AsyncGenerator[KeptServers]:
    """`config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving."""
    ports = _choose_ports(config)
    servers: list[KeptServer] = []
    for number, port in enumerate(ports):
        url = f"http://127.0.0.1:{port}"
        name = "engine" if len(ports) == 1 else f"engine {number}"
        servers.append(
            KeptServer(
                url,
                start=partial(_start, name, config, _command(config, model, version, port, number), logs),
                serves=partial(_serves, url, config.startup_timeout_s),
                end=_end,
            )
        )
    async with keep_servers(servers) as kept:
        yield kept


async def _start(name: str, config: EngineConfig, command: Sequence[str], logs: Path) -> ManagedProcess:
    return await ManagedProcess.start(
        name,
        command,
        log_path=logs / f"{name.replace(' ', '-')}.log",
        env={**thread_variables(config.threads), "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )


def _command(config: EngineConfig, model: Path, version: WeightVersion, port: int, number: int) -> Sequence[str]:
    assert config.python is not None  # the config has seen to it
    options = {
        "--model-path": os.path.abspath(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--weight-version": str(version),
        "--context-length": str(config.max_context_tokens + CONTEXT_MARGIN),
        "--max-running-requests": str(config.max_running_requests),
    }
    if config.kv_tokens is not None:
        options["--max-total-tokens"] = str(config.kv_tokens)
    if config.device != "auto":
        options["--device"] = config.device
    flags = ("--skip-server-warmup", "--incremental-streaming-output")
    plan = EnginePlan.of(config)
    own_gpus = ("--base-gpu-id", str(plan.first_gpu_of(number))) if plan.is_spread else ()
    return [
        config.python,
        str(LAUNCHER),
        *(word for pair in options.items() for word in pair),
        *flags,
        *config.server_args,
        *own_gpus,  # the last one counts
    ]


async def _serves(url: str, timeout_s: float, process: ManagedProcess) -> None:
    """Return when the server serves. Raises ProcessDied and EngineUnreachable."""
    engine = SglangEngine(url)
    try:
        await unless_it_dies(process, engine.wait_ready(timeout_s))
    finally:
        await engine.aclose()


async def _end(process: ManagedProcess) -> None:
    """End the server with all its processes, which are a session of their own."""
    await process.aclose()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _choose_ports(config: EngineConfig) -> list[int]:
    """The port of the config, or free ones: SGLang takes no port that is open already, so they are let go of again."""
    if config.port:
        return [config.port]
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(config.num_servers)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
