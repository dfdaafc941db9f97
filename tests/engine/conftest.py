"""A tiny random model, transformers' plain forward as the reference, and the embedded engine served over real HTTP."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from areal_agent.engine.client import HttpEngine
from areal_agent.engine.embedded.model import ModelRunner
from areal_agent.engine.embedded.sampler import Grammars
from areal_agent.engine.embedded.scheduler import Scheduler
from areal_agent.engine.embedded.server import EngineServer
from areal_agent.types import (
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SamplingParams,
    SharedMemoryWeights,
    WeightVersion,
)
from areal_agent.weights.channels import SharedMemoryChannel, layout

from .transfers import parameters_of

VOCAB_SIZE = 97
MAX_CONTEXT = 512
DEADLINE_S = 120.0  # only a hang is longer
TOLERANCE = 1e-4  # of log-probabilities


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a random model and return its folder. Its weights are large enough for peaked, distinct distributions."""

    def make(
        family: str = "qwen3", seed: int = 0, *, is_shaken: bool = False, rare_end: int | None = None, **others: object
    ) -> Path:
        kind = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "mistral": MistralConfig}[family]
        shape = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": MAX_CONTEXT,
            "tie_word_embeddings": True,
            "initializer_range": 0.15,
            "bos_token_id": None,
            "eos_token_id": rare_end,
            "pad_token_id": None,
        }
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(kind(**(shape | others)))
        model.generation_config.eos_token_id = model.config.eos_token_id
        for parameter in model.parameters() if is_shaken else ():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1, so leaving them out would go unnoticed
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        if rare_end is not None:  # all tokens have this dimension in common but the end token, which is hardly sampled
            table = model.get_input_embeddings().weight.data
            table[:, 0] = 10.0
            table[rare_end, 0] = 0.0
        folder = tmp_path_factory.mktemp(f"{family}_{seed}")
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny(make_model: Callable[..., Path]) -> Path:
    """The model of most tests. It has no end token, so that answers are as long as a test asks."""
    return make_model(seed=0)


@pytest.fixture(scope="session")
def other(make_model: Callable[..., Path]) -> Path:
    """Other weights for the same model."""
    return make_model(seed=1)


class Truth:
    """Log-probabilities by transformers' own attention, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()

    def distribution(self, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """log softmax(logits / temperature) after each token, [T, V]."""
        with torch.no_grad():
            return torch.log_softmax(self.model(torch.tensor([list(ids)])).logits[0] / temperature, dim=-1)

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> list[float]:
        """The log-probability of each sampled token, given the prompt and the tokens before it."""
        rows = self.distribution([*prompt, *sampled], temperature)[len(prompt) - 1 : -1]
        return rows.gather(1, torch.tensor(list(sampled))[:, None])[:, 0].tolist()

    def check(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Check that these weights sampled the whole answer."""
        assert result.logprobs == pytest.approx(self.logprobs(request.input_ids, result.token_ids), abs=TOLERANCE)


@pytest.fixture(scope="session")
def truth() -> Callable[[Path], Truth]:
    known: dict[Path, Truth] = {}
    return lambda folder: known.setdefault(folder, Truth(folder))


class Wrapped:
    """A ModelRunner of which a test has something done differently."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str):
        return getattr(self._runner, name)


class Gate(Wrapped):
    """Its decode steps a test lets through one by one."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._permits = threading.Semaphore(0)
        self._is_open = True
        self.breaks_with: Exception | None = None
        self.is_blocked = threading.Event()

    def decode(self, *args):
        if self.breaks_with is not None:
            raise self.breaks_with
        if not self._is_open and not self._permits.acquire(blocking=False):
            self.is_blocked.set()
            self._permits.acquire()
            self.is_blocked.clear()
        return self._runner.decode(*args)

    def shut(self) -> None:
        """Make every decode step wait for a permit from now on."""
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    async def steps(self, num_steps: int) -> None:
        """Let exactly this many decode steps through; the model thread then stands before the next one."""
        for _ in range(num_steps):
            await asyncio.to_thread(self.is_blocked.wait, DEADLINE_S)
            self.is_blocked.clear()
            self._permits.release()
        await asyncio.to_thread(self.is_blocked.wait, DEADLINE_S)

    async def meanwhile(self, call: Awaitable):
        """Await a call that needs the model thread, and let through only as many steps as that takes."""
        task = asyncio.ensure_future(call)
        while not task.done():
            if self.is_blocked.is_set():
                self.is_blocked.clear()
                self._permits.release()
            await asyncio.sleep(0)
        return await task


class Served:
    """An engine behind HTTP, with everything that a test may need."""

    def __init__(self, engine: HttpEngine, server: EngineServer, gate: Gate) -> None:
        self.engine = engine
        self.server = server
        self.gate = gate

    async def under_way(self, request: GenerateRequest, *on_chunk, num_steps: int = 5) -> asyncio.Task:
        """Begin a request, and stop the model thread after so many decode steps."""
        self.gate.shut()
        answer = asyncio.create_task(self.engine.generate(request, *on_chunk))
        await self.gate.steps(num_steps)
        return answer

    async def queued(
        self, request: GenerateRequest, *on_chunk, mode: PauseMode = PauseMode.RETRACT
    ) -> asyncio.Task[GenerateResult]:
        """Pause, and begin a request, which waits for the end of the pause."""
        await self.engine.pause(mode)
        answer = asyncio.create_task(self.engine.generate(request, *on_chunk))
        await self.until(lambda stats: stats.num_queued == 1)
        return answer

    async def interrupt(self, mode: PauseMode, *update: object) -> None:
        """Pause in the midst of requests, load new weights if any are given, and let everything go on."""
        await self.gate.meanwhile(self.engine.pause(mode))
        if update:
            await self.engine.update_weights(*update)
        self.gate.open()
        await self.engine.resume()

    async def until(self, is_so: Callable[[object], bool]) -> None:
        """Wait until the engine's stats say so."""
        async with asyncio.timeout(DEADLINE_S):
            while not is_so(await self.engine.stats()):
                pass


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def fixed_shapes() -> bool:
    """Whether decode steps have fixed shapes, as on a GPU."""
    return False


@pytest.fixture(params=[False, True], ids=["rows", "fixed shapes"])
def both_ways(request: pytest.FixtureRequest) -> bool:
    """`fixed_shapes = both_ways` in a file runs its tests without and with them."""
    return request.param


@pytest.fixture
def serve(fixed_shapes: bool) -> Serve:
    @asynccontextmanager
    async def serving(
        folder: Path,
        *,
        num_slots: int = 8,
        max_context: int = MAX_CONTEXT,
        push_timeout_s: float = DEADLINE_S,
        grammars: Grammars | None = None,
    ):
        runner = ModelRunner(
            str(folder),
            device="cpu",
            num_slots=num_slots,
            max_context_tokens=max_context,
            fixed_shapes=fixed_shapes,
        )
        gate = Gate(runner)
        server = await EngineServer.start(
            gate, version=WeightVersion(step=7), push_timeout_s=push_timeout_s, grammars=grammars
        )
        engine = HttpEngine(server.base_url)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield Served(engine, server, gate)
        finally:
            gate.open()
            await engine.aclose()
            await server.aclose()

    return serving


@pytest.fixture
async def served(serve: Serve, tiny: Path) -> AsyncGenerator[Served]:
    """The model of most tests behind HTTP."""
    async with serve(tiny) as served:
        yield served


@pytest.fixture
def schedule(fixed_shapes: bool):
    """Start a model thread without a server. Calls from one thread are obeyed in their order."""

    @contextmanager
    def scheduling(folder: Path, wrap: Callable[[ModelRunner], Wrapped] = Gate):
        model = ModelRunner(
            str(folder), device="cpu", num_slots=8, max_context_tokens=MAX_CONTEXT, fixed_shapes=fixed_shapes
        )
        runner = wrap(model)
        scheduler = Scheduler(runner, version=WeightVersion(step=7), on_failure=lambda: None)
        try:
            yield scheduler, runner
        finally:
            if isinstance(runner, Gate):
                runner.open()
            scheduler.close()

    return scheduling


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    """Make a request whose prompt is drawn from its number."""

    def make(number: int = 0, *, prompt_length: int = 10, **sampling: object) -> GenerateRequest:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCAB_SIZE, (prompt_length,), generator=generator).tolist()
        params = SamplingParams(**({"max_tokens": 12, "seed": number} | sampling))
        return GenerateRequest(request_id=f"request-{number:04}", input_ids=tuple(ids), sampling=params)

    return make


@pytest.fixture
def share(tmp_path: Path) -> Callable[[Path], SharedMemoryWeights]:
    """Write the weights of a folder into one mapped file, as the trainer does."""

    def write(folder: Path) -> SharedMemoryWeights:
        parameters = parameters_of(folder)
        memory = Path(tempfile.mkdtemp(dir=tmp_path))
        return SharedMemoryChannel(memory, layout(parameters.items(), torch.float32)).write(parameters)

    return write
