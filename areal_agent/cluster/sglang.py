"""How a SGLang server is started, in the environment that has SGLang: its arguments. It knows no process."""

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from areal_agent.cluster.kept_server import KeptServers
from areal_agent.cluster.servers import Launch, start_servers
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.gpus import EnginePlan
from areal_agent.engine.sglang import LAUNCHER
from areal_agent.engine.sglang.engine import SglangEngine
from areal_agent.types import WeightVersion

CONTEXT_MARGIN = 8
"""SGLang cuts requests off a few tokens before the end of its context: it is given so much more than is used."""


def start_sglang(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """`config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving."""
    launch = Launch(
        command=lambda port, number: _command(config, model, version, port, number),
        client=SglangEngine,
        variables=lambda _: {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    )
    return start_servers(config, launch, logs)


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
    has_own_gpus = plan.is_spread or config.first_gpu
    own_gpus = ("--base-gpu-id", str(plan.first_gpu_of(number))) if has_own_gpus else ()
    return [
        config.python,
        str(LAUNCHER),
        *(word for pair in options.items() for word in pair),
        *flags,
        *config.server_args,
        *own_gpus,  # the last one counts
    ]
