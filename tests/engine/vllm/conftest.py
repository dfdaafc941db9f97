"""The adapter in front of a real vLLM server, started once, in the environment that `make_environment.sh` makes.

Without that environment these tests skip.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from areal_agent.cluster.vllm import start_vllm
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.vllm.engine import VllmEngine
from areal_agent.types import WeightVersion

from ..sglang.conftest import CONTEXT, DEADLINE_S, STARTUP_S, Stage, with_tokenizer

HEAD_DIM = 32  # the least that vLLM has attention for on a CPU
LONG = 3500  # tokens: on busy cores its front end has told of the first when hundreds are sampled


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python of vLLM's environment."""
    python = os.environ.get("AREAL_AGENT_VLLM_PYTHON")
    if not python:
        pytest.skip("AREAL_AGENT_VLLM_PYTHON is not set: make it with tests/engine/vllm/make_environment.sh DIR")
    if not Path(python).is_file():
        pytest.skip(f"AREAL_AGENT_VLLM_PYTHON is {python!r}, and there is no such file")
    return python


@pytest.fixture(scope="session")
def vllm_model(make_model, small_model) -> Path:
    return with_tokenizer(
        make_model(vocab_size=400, seed=0, max_position_embeddings=CONTEXT, head_dim=HEAD_DIM), small_model
    )


@pytest.fixture(scope="session")
def vllm_other(make_model) -> Path:
    """Other weights for the same model."""
    return make_model(vocab_size=400, seed=1, max_position_embeddings=CONTEXT, head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def vllm_server(vllm_python, vllm_model, tmp_path_factory) -> Iterator[str]:
    """The URL of a server that all tests share."""
    config = EngineConfig(
        backend="vllm",
        python=vllm_python,
        max_context_tokens=CONTEXT,
        kv_tokens=8 * CONTEXT,
        max_running_requests=16,
        startup_timeout_s=STARTUP_S,
    )
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        started = start_vllm(config, vllm_model, WeightVersion(step=7), tmp_path_factory.mktemp("vllm"))
        (url,) = runner.run(stack.enter_async_context(started)).urls
        try:
            yield url
        finally:
            runner.run(stack.aclose())


@pytest.fixture
async def stage(vllm_server: str, vllm_model: Path, vllm_other: Path) -> AsyncGenerator[Stage]:
    """What the contract of SGLang's client is tested on, with vLLM behind it."""
    async with asyncio.timeout(DEADLINE_S):
        engine = VllmEngine(vllm_server)
        try:
            served = (await engine.info()).weight_version
            version = WeightVersion(step=served.step + 1)
            await engine.load(vllm_model, version)  # whatever the test before has left
            yield Stage(engine=engine, model=vllm_model, other=vllm_other, old=version, is_real=True, num_long=LONG)
        finally:
            await engine.resume()
            await engine.aclose()
