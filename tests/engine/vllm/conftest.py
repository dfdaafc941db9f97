"""The adapter in front of a real vLLM server, started once, in the environment that `make_environment.sh` makes.

Without that environment these tests skip.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from areal_agent.cluster.servers import start_vllm
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.vllm.server import VllmServer

from ..servers import python_of, running_server
from ..sglang.conftest import CONTEXT, DEADLINE_S, END, Stage, open_stage, with_tokenizer

ON_CPU = {"backend": "vllm", "max_context_tokens": CONTEXT, "kv_tokens": 8 * CONTEXT}
HEAD_DIM = 32  # the least that vLLM has attention for on a CPU
LONG = 3500  # tokens: on busy cores its front end has told of the first when hundreds are sampled


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return python_of("vllm")


@pytest.fixture(scope="session")
def vllm_model(make_model, small_model) -> Path:
    return with_tokenizer(
        make_model(vocab_size=400, seed=0, max_position_embeddings=CONTEXT, head_dim=HEAD_DIM, rare_end=END),
        small_model,
    )


@pytest.fixture(scope="session")
def vllm_other(make_model) -> Path:
    """Other weights for the same model."""
    return make_model(vocab_size=400, seed=1, max_position_embeddings=CONTEXT, head_dim=HEAD_DIM, rare_end=END)


def running_vllm(python: str, model: Path, logs: Path) -> AbstractContextManager[str]:
    """The URL of a server that serves a model, or applies adapters to one."""
    return running_server(start_vllm, python, model, logs, **ON_CPU)


@pytest.fixture(scope="session")
def starting_vllm_server(vllm_python, vllm_model, tmp_path_factory) -> Iterator[Future[str]]:
    """The URL of a server that all tests share, once it serves. One that starts keeps a single core busy."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        server = running_vllm(vllm_python, vllm_model, tmp_path_factory.mktemp("vllm"))
        yield thread.submit(stack.enter_context, server)
        thread.submit(stack.close).result()  # its event loop is that thread's


@pytest.fixture(scope="session")
def vllm_server(starting_vllm_server: Future[str]) -> str:
    """The URL of a server that all tests share."""
    return starting_vllm_server.result()


@pytest.fixture
def running(vllm_server: str, vllm_other: Path) -> tuple[EngineConfig, Path]:
    """A server that somebody else has started, as a config names it, and other weights for its model."""
    return EngineConfig(backend="vllm", urls=(vllm_server,), max_context_tokens=300), vllm_other


@pytest.fixture
async def stage(vllm_server: str, vllm_model: Path, vllm_other: Path) -> AsyncGenerator[Stage]:
    """The stage of SGLang's contract, with vLLM behind it."""
    async with (
        asyncio.timeout(DEADLINE_S),
        open_stage(VllmServer(vllm_server), vllm_model, vllm_other, num_long=LONG) as stage,
    ):
        yield stage
