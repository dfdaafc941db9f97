"""How embedded engines are started on this machine: their arguments, and where each is found. It knows no wire."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from urllib.parse import urlsplit

from areal_agent.cluster.kept_server import KeptServer, KeptServers, keep_servers
from areal_agent.cluster.local import thread_variables, unless_it_dies
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.gpus import EnginePlan, visible_gpus
from areal_agent.errors import EngineUnreachable
from areal_agent.process import ManagedProcess
from areal_agent.types import WeightVersion

POLL_S = 0.05


def start_embedded(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """`config.num_servers` engines that serve `model` as `version`; kept alive, and ended on leaving."""
    places = [_Place(config, model, version, logs, number) for number in range(config.num_servers)]
    return keep_servers([KeptServer(place.start, place.serves, ManagedProcess.aclose) for place in places])


class _Place:
    """Of one engine: on any free port at first, and there again whenever it is started anew."""

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
        """Its URL, once it serves. Raises ProcessDied and EngineUnreachable."""
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
    """What starts each of them, wherever it is to listen."""
    options = {
        "--model": str(model),
        "--device": config.device,
        "--threads": str(config.threads),
        "--weight-version": str(version),
        "--max-running": str(config.max_running_requests),
        "--max-context": str(config.max_context_tokens),
        "--kv-layout": config.kv_layout,
        "--sharing": str(EnginePlan.of(config).num_sharing),
        "--drain": "0",  # a run that ends has nobody left who waits
    }
    if config.kv_tokens is not None:
        options["--kv-tokens"] = str(config.kv_tokens)
    if config.leave_gib is not None:
        options["--leave-gib"] = str(config.leave_gib)
    flags = [] if config.cuda_graphs else ["--no-cuda-graphs"]
    words = (word for pair in options.items() for word in pair)
    return [sys.executable, "-m", "areal_agent.engine", *words, *flags]
