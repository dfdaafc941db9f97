"""How a vLLM server is started, in the environment that has vLLM: its arguments. It knows no process."""

import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from areal_agent.cluster.kept_server import KeptServers
from areal_agent.cluster.servers import Launch, start_servers
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.vllm import LAUNCHER
from areal_agent.engine.vllm.engine import VllmEngine

MAX_LOGPROBS = 32
"""Of a token: one more than is asked for, and a gateway hands out 20."""

BLOCK_TOKENS = 32
"""What keys and values are kept by, where `kv_tokens` says how many: a CPU wants multiples of it, a GPU takes them."""


def start_vllm(config: EngineConfig, model: Path, logs: Path) -> AbstractAsyncContextManager[KeptServers]:
    """`config.num_servers` servers of `model`, which have no version yet; kept alive, and ended on leaving."""
    launch = Launch(command=lambda port, _: _command(config, model, port), client=VllmEngine)
    return start_servers(config, launch, logs)


def _command(config: EngineConfig, model: Path, port: int) -> Sequence[str]:
    assert config.python is not None  # the config has seen to it
    options = {
        "--model": os.path.abspath(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(config.max_context_tokens),
        "--max-num-seqs": str(config.max_running_requests),
        "--max-logprobs": str(MAX_LOGPROBS),
        "--generation-config": "vllm",
    }
    if config.kv_tokens is not None:
        num_blocks = -(-config.kv_tokens // BLOCK_TOKENS) + 1  # one stands for none
        options |= {"--block-size": str(BLOCK_TOKENS), "--num-gpu-blocks-override": str(num_blocks)}
    flags = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")
    return [
        config.python,
        str(LAUNCHER),
        *(word for pair in options.items() for word in pair),
        *flags,
        *config.server_args,
    ]
