"""Stages for the adapter: in front of the embedded engine, which has the same wire, and of a real SGLang server.

The real server is started once, in the environment that `make_environment.sh` makes; without it those tests skip.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_agent.cluster.servers import CONTEXT_MARGIN, start_sglang
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.foreign.engine import ForeignEngine
from areal_agent.engine.foreign.server import ForeignServer
from areal_agent.engine.sglang.server import SglangServer
from areal_agent.types import DiskWeights, GenerateRequest, PauseMode, SharedMemoryWeights, TokenChunk, WeightVersion
from areal_agent.weights.push import push

from ..sampled import Weights
from ..servers import python_of, running_server

DEADLINE_S = 300.0  # only a hang is longer
CONTEXT = 4096
END = 96  # the model's end token, which is sampled only where a test biases it, so that lengths are what a test asks
ON_CPU = {
    "backend": "sglang",
    "device": "cpu",
    "max_context_tokens": CONTEXT - CONTEXT_MARGIN,
    "kv_tokens": 8 * CONTEXT,
}


@pytest.fixture(scope="session")
def sglang_python() -> str:
    return python_of("sglang")


def with_tokenizer(model: Path, donor: Path) -> Path:
    """Give a model the tokenizer that SGLang asks for; without an end token, because the model has one."""
    shutil.copy(donor / "tokenizer.json", model)
    settings = json.loads((donor / "tokenizer_config.json").read_text())
    settings = {name: value for name, value in settings.items() if name not in ("eos_token", "extra_special_tokens")}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


@pytest.fixture(scope="session")
def real_model(make_model, small_model) -> Path:
    return with_tokenizer(
        make_model(vocab_size=400, seed=0, max_position_embeddings=CONTEXT, rare_end=END), small_model
    )


@pytest.fixture(scope="session")
def real_other(make_model) -> Path:
    """Other weights for the same model."""
    return make_model(vocab_size=400, seed=1, max_position_embeddings=CONTEXT, rare_end=END)


@pytest.fixture(scope="session")
def long_model(make_model) -> Path:
    """A model like `real_model` for the embedded engine, which needs no tokenizer."""
    return make_model(seed=0, max_position_embeddings=CONTEXT, rare_end=END)


@pytest.fixture(scope="session")
def long_other(make_model) -> Path:
    """Other weights for the same model."""
    return make_model(seed=1, max_position_embeddings=CONTEXT, rare_end=END)


@pytest.fixture(scope="session")
def real_server(sglang_python, real_model, tmp_path_factory) -> Iterator[str]:
    """The URL of a server that all tests share."""
    with running_server(start_sglang, sglang_python, real_model, tmp_path_factory.mktemp("sglang"), **ON_CPU) as url:
        yield url


@pytest.fixture
def running(real_server: str, real_other: Path) -> tuple[EngineConfig, Path]:
    """A server that somebody else has started, as a config names it, and other weights for its model."""
    return EngineConfig(urls=(real_server,), max_context_tokens=300), real_other


async def serve_again(url: str, model: Path, version: WeightVersion) -> None:
    """Make the server serve its initial weights, whatever other tests have left there."""
    async with aclosing(ForeignEngine(SglangServer(url))) as engine:
        await engine.load(model, version)


@dataclass(kw_only=True, slots=True)
class Stage:
    """The adapter, what serves behind it, and the two sets of weights."""

    engine: ForeignEngine
    model: Path
    other: Path
    old: WeightVersion
    is_real: bool
    num_long: int = 400  # tokens that are still being sampled when a test gets to it

    @property
    def before(self) -> Weights:
        """The weights that serve at the beginning."""
        return Weights(model=self.model, version=self.old)

    @property
    def after(self) -> Weights:
        """The weights that serve after a push."""
        return Weights(model=self.other, version=self.new)

    @property
    def new(self) -> WeightVersion:
        """The version after the one that served at the beginning."""
        return WeightVersion(step=self.old.step + 1)

    async def send(self, weights: SharedMemoryWeights | DiskWeights) -> None:
        """Do the first half of a push; requests go on meanwhile."""
        await self.engine.begin_push("p")
        await self.engine.send_push("p", weights)

    async def swap(self, mode: PauseMode) -> None:
        """Do the second half."""
        await self.engine.pause(mode)
        await self.engine.commit_push("p", self.new)
        await self.engine.resume()

    async def push(self, weights: SharedMemoryWeights | DiskWeights, mode: PauseMode = PauseMode.RETRACT) -> None:
        await push([self.engine], weights, self.new, mode)


@asynccontextmanager
async def open_stage(
    server: ForeignServer, model: Path, other: Path, *, num_long: int, begun_with: Path | None = None
) -> AsyncGenerator[Stage]:
    """Open a stage in front of a real server, which serves `model`, by that folder or by `begun_with`."""
    async with aclosing(ForeignEngine(server)) as engine:
        served = (await engine.info()).weight_version
        version = WeightVersion(step=served.step + 1)
        await engine.load(begun_with or model, version)  # whatever the test before has left
        try:
            yield Stage(engine=engine, model=model, other=other, old=version, is_real=True, num_long=num_long)
        finally:
            await engine.resume()


@asynccontextmanager
async def _embedded_stage(serve, model: Path, other: Path) -> AsyncGenerator[Stage]:
    async with (
        serve(model, max_context=CONTEXT - CONTEXT_MARGIN) as served,
        aclosing(ForeignEngine(SglangServer(served.engine.base_url))) as engine,
    ):
        yield Stage(engine=engine, model=model, other=other, old=WeightVersion(step=7), is_real=False)


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Stage]:
    """Open a stage outside of the test's event loop, since the server has one of its own."""
    if request.param == "real":
        url, model, other = map(request.getfixturevalue, ("real_server", "real_model", "real_other"))
        return open_stage(SglangServer(url), model, other, num_long=1000)
    return _embedded_stage(*map(request.getfixturevalue, ("serve", "long_model", "long_other")))


@pytest.fixture
async def stage(opened: AbstractAsyncContextManager[Stage]) -> AsyncGenerator[Stage]:
    """A stage for each of the two servers, which share the contract."""
    async with asyncio.timeout(DEADLINE_S), opened as stage:
        yield stage


async def until_one_waits(engine: ForeignEngine) -> None:
    """Wait until a call of `generate` has begun."""
    while not engine.requests.by_id:  # noqa: ASYNC110 (a call that has begun tells nobody)
        await asyncio.sleep(0)


class Watched:
    """A request under way, and the tokens that have arrived."""

    def __init__(self, engine: ForeignEngine, request: GenerateRequest) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._has_grown = asyncio.Event()
        self.answer = asyncio.ensure_future(engine.generate(request, self._take))

    def _take(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self._has_grown.set()

    async def until(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        while len(self.token_ids) < num_tokens and not self.answer.done():
            self._has_grown.clear()
            growing = asyncio.ensure_future(self._has_grown.wait())
            await asyncio.wait({growing, self.answer}, return_when=asyncio.FIRST_COMPLETED)
            growing.cancel()
        assert not self.answer.done(), "the answer was over too soon"
