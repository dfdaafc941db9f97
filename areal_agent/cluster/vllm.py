"""How a vLLM server is started, in the environment that has vLLM: its arguments. It knows no process."""

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from areal_agent.cluster.kept_server import KeptServers
from areal_agent.cluster.servers import Launch, start_servers
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.adapters import AdapterForm, is_adapter, read_form
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.gpus import visible_gpus
from areal_agent.engine.vllm import ADAPTER_RANKS, LAUNCHER
from areal_agent.engine.vllm.info import ADAPTER
from areal_agent.engine.vllm.server import VllmServer
from areal_agent.errors import EngineError, EngineUnreachable
from areal_agent.types import WeightVersion

MAX_LOGPROBS = 32
"""Of a token: one more than is asked for, and a gateway hands out 20."""

BLOCK_TOKENS = 32
"""What keys and values are kept by, where `kv_tokens` says how many: a CPU wants multiples of it, a GPU takes them."""

FLAGS = ("--enable-prompt-tokens-details", "--disable-uvicorn-access-log")


class StartedServer:
    """A server that is given its version once it serves, also when it was started again: vLLM has no flag for it."""

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
            raise EngineUnreachable(f"it serves, and takes no weights: {error}") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._engine.aclose()


def start_vllm(
    config: EngineConfig, model: Path, version: WeightVersion, logs: Path
) -> AbstractAsyncContextManager[KeptServers]:
    """`config.num_servers` servers that serve `model` as `version`; kept alive, and ended on leaving.

    `model` may be a folder of adapters: then they apply these to the model that they are for, and take adapters alone.
    """
    form = read_form(model) if is_adapter(model) else None
    launch = Launch(
        launcher=LAUNCHER,
        options=_options(config, model) if form is None else _adapter_options(config, model, form),
        flags=(*FLAGS, *(("--enable-lora",) if form else ())),
        client=lambda url: StartedServer(ForeignEngine(VllmServer(url)), model, version),
        variables=lambda number: visible_gpus(config, number, os.environ),
    )
    return start_servers(config, launch, logs)


def _options(config: EngineConfig, model: Path) -> dict[str, str]:
    options = {
        "--model": os.path.abspath(model),
        "--max-model-len": str(config.max_context_tokens),
        "--max-num-seqs": str(config.max_running_requests),
        "--max-logprobs": str(MAX_LOGPROBS),
        "--generation-config": "vllm",
    }
    if config.kv_tokens is not None:
        num_blocks = -(-config.kv_tokens // BLOCK_TOKENS) + 1  # one stands for none
        options |= {"--block-size": str(BLOCK_TOKENS), "--num-gpu-blocks-override": str(num_blocks)}
    return options


def _adapter_options(config: EngineConfig, adapters: Path, form: AdapterForm) -> dict[str, str]:
    return {
        **_options(config, form.base),
        "--max-lora-rank": str(next(rank for rank in ADAPTER_RANKS if rank >= form.rank)),
        "--lora-modules": f"{ADAPTER}={os.path.abspath(adapters)}",
    }
