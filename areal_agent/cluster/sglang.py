"""How a SGLang server is started, in the environment that has SGLang: its arguments. It knows no process."""

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from areal_agent.cluster.kept_server import KeptServers
from areal_agent.cluster.servers import Launch, start_servers
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.gpus import EnginePlan
from areal_agent.engine.sglang import LAUNCHER
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.types import WeightVersion

CONTEXT_MARGIN = 8
"""SGLang cuts requests off a few tokens before the end of its context: it is given so much more than is used."""


def start_sglang(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """`config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving."""
    launch = Launch(
        launcher=LAUNCHER,
        options=_options(config, model, version),
        flags=("--skip-server-warmup", "--incremental-streaming-output"),
        own_options=lambda number: _gpus(config, number),
        client=lambda url: ForeignEngine(SglangServer(url)),
        variables=lambda _: {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )
    return start_servers(config, launch, logs)


def _options(config: EngineConfig, model: Path, version: WeightVersion) -> dict[str, str]:
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
