"""An engine and a trainer, started as a run starts them and tried out. All that it starts has ended when it returns.

    trainer process ─▶ engine ─▶ ids in and out ─▶ interruption ─▶ trainer's model ─▶ a train step ─▶ a push

Its figures are the run's own: the difference between the log-probabilities of engine and trainer, the cost of a push,
and the versions of an answer under which a push came. An engine that belongs to a gateway elsewhere is only asked for
answers: agents are at work there.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from areal_agent.cluster.engines import engine_weights, open_engine
from areal_agent.cluster.gang import Gang, start_trainer
from areal_agent.cluster.local import weights_folder
from areal_agent.config import Config
from areal_agent.doctor.findings import Finding, Report, State, attempt, examined, gib
from areal_agent.doctor.model import ModelShape
from areal_agent.dtype import computed_in
from areal_agent.engine.config import may_be_on
from areal_agent.engine.fleet.member import ServedEngine
from areal_agent.engine.pushes import size_of
from areal_agent.errors import ConfigError
from areal_agent.observe.progress import Progress
from areal_agent.protocols import Engine, MemoryHolder, Sampler
from areal_agent.run.sources import connect_engine, memory_lent
from areal_agent.run.teacher import obtain_teacher
from areal_agent.tokens.records import token_records
from areal_agent.tokens.renderer import Renderer
from areal_agent.trainer.client import TrainerClient
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.wire import StepReport, TrainerInfo
from areal_agent.types import (
    Completion,
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    Rewards,
    RolloutBatch,
    SamplingParams,
    Status,
    TokenChunk,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Weights,
    WeightVersion,
)
from areal_agent.weights.push import push


class Stream:
    """A request in flight, whose tokens are counted as they come: sent on entering, and cancelled on leaving."""

    def __init__(self, engine: Sampler, request: GenerateRequest) -> None:
        self.num_tokens = 0
        self._engine = engine
        self._request = request
        self._has_changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._answer = asyncio.ensure_future(self._engine.generate(self._request, self._take))
        self._answer.add_done_callback(lambda _: self._has_changed.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.cancel()
        await asyncio.wait({self._answer})

    @property
    def has_ended(self) -> bool:
        return self._answer.done()

    async def grows(self, *, beyond: int = 0) -> bool:
        """Wait for more than `beyond` tokens; False when the answer ended with fewer. Raises what `generate` raises."""
        while self.num_tokens <= beyond and not self.has_ended:
            self._has_changed.clear()
            await self._has_changed.wait()
        if self.has_ended:
            self._answer.result()
        return self.num_tokens > beyond

    async def end(self) -> GenerateResult:
        """Abort the request and return what it has."""
        if not self.has_ended:
            await self._engine.abort(self._request.request_id)
        return await self._answer

    def _take(self, chunk: TokenChunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self._has_changed.set()


NUM_SHORT_TOKENS = 32
MAX_LONG_TOKENS = 4096
TRANSIT_S = 0.2
"""The longest transit of a token that was sampled before a pause."""
HOLDING_S = 0.3
NEVER = -100.0
"""The bias of an end token, so that an answer goes on. Servers accept no lower one."""
ROUNDING = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Makes the requests that the gateway would send for a short question."""

    prompt_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    temperature: float
    info: EngineInfo

    @property
    def room(self) -> int:
        """The number of tokens that an answer may have."""
        return self.info.max_context_tokens - len(self.prompt_ids)

    def short(self, number: int) -> GenerateRequest:
        """Return a request that ends by itself."""
        sampling = SamplingParams(
            temperature=self.temperature,
            max_tokens=min(NUM_SHORT_TOKENS, self.room),
            stop_token_ids=self.stop_token_ids,
            seed=number,
        )
        return GenerateRequest(request_id=f"doctor-short-{number:04}", input_ids=self.prompt_ids, sampling=sampling)

    def long(self, number: int) -> GenerateRequest:
        """Return a request that samples no end token: it runs until its context is full."""
        short = self.short(number)
        bias = tuple((token_id, NEVER) for token_id in self.stop_token_ids)
        sampling = replace(
            short.sampling, max_tokens=min(MAX_LONG_TOKENS, self.room), stop_token_ids=(), logit_bias=bias
        )
        return replace(short, request_id=f"doctor-large-{number:04}", sampling=sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """An answer, and its tokens as they were streamed."""

    request: GenerateRequest
    result: GenerateResult
    streamed: tuple[int, ...]


async def sample(engine: Sampler, asker: Asker, number: int = 2) -> list[Sampled]:
    """Sample short answers, all at once. Raises EngineError."""

    async def answer(request: GenerateRequest) -> Sampled:
        chunks: list[TokenChunk] = []
        result = await engine.generate(request, chunks.append)
        streamed = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
        return Sampled(request=request, result=result, streamed=streamed)

    return await asyncio.gather(*(answer(asker.short(index)) for index in range(number)))


def sampling_finding(answers: Sequence[Sampled], info: EngineInfo) -> Finding:
    """Report whether the answers can be recorded in a ledger."""
    faults = [fault for answer in answers for fault in faults_of(answer, info)]
    if faults:
        return Finding("engine", State.FAIL, f"its answers cannot be recorded: {faults[0]}", "see its log")
    count = sum(len(answer.result.token_ids) for answer in answers)
    found = (
        f"serves version {info.weight_version} with a context of {info.max_context_tokens} tokens; ids in and out, "
        f"{count} of them streamed with log-probabilities and versions"
    )
    return Finding("engine", State.OK, found)


def faults_of(answer: Sampled, info: EngineInfo) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    result, number = answer.result, len(answer.result.token_ids)
    if not 1 <= number <= answer.request.sampling.max_tokens:
        yield f"{number} tokens, where 1 to {answer.request.sampling.max_tokens} were asked for"
    if answer.streamed != result.token_ids:
        yield "the tokens that were streamed are not those of the answer"
    if any(not 0 <= token_id < info.vocab_size for token_id in result.token_ids):
        yield f"an id outside the vocabulary of {info.vocab_size}"
    if len(result.logprobs) != number or any(not math.isfinite(one) or one > ROUNDING for one in result.logprobs):
        yield f"{len(result.logprobs)} log-probabilities for {number} tokens, or one that is not a log-probability"
    if [(span.start, span.end, span.version) for span in result.versions] != [(0, number, info.weight_version)]:
        yield f"its tokens are labelled {told_spans(result)}, but version {info.weight_version} serves"


async def interruption_findings(engine: Engine, asker: Asker) -> list[Finding]:
    """Report whether a pause stops an answer in mid-sentence, and it goes on after. Raises EngineError."""
    async with Stream(engine, asker.long(0)) as stream:
        await stream.grows()
        await engine.pause(PauseMode.RETRACT)
        try:
            await asyncio.sleep(TRANSIT_S)
            num_before = stream.num_tokens
            await asyncio.sleep(HOLDING_S)
            num_sampled = stream.num_tokens - num_before
            has_ended = stream.has_ended
        finally:
            await engine.resume()
        if has_ended:
            found = "the answer had ended before it could be interrupted: not seen"
            return [Finding("interruption", State.WARN, found)]
        goes_on = await stream.grows(beyond=num_before + num_sampled)
    if num_sampled:
        found = f"{num_sampled} tokens were sampled during a pause"
        return [Finding("interruption", State.FAIL, found, "new weights would be loaded under them")]
    if not goes_on:
        found = "an answer that was paused did not go on"
        return [Finding("interruption", State.FAIL, found, "see the engine's log")]
    return [Finding("interruption", State.OK, f"an answer held still after {num_before} tokens, and went on")]


def told_spans(result: GenerateResult) -> str:
    """Return the versions of an answer: `12 of 0:0, then 30 of 0:1`."""
    return ", then ".join(f"{span.end - span.start} of {span.version}" for span in result.versions) or "not at all"


CLOSE = 1e-3
"""Largest difference in nats between the log-probabilities of an engine and a trainer in float32."""
NEAR = 0.1
"""Largest mean difference where one of them computes in bfloat16."""
FAR = 0.5
"""A mean difference from which they have other weights or another temperature."""

NUM_TOKENS_AFTER = 4

FIRST, NEXT = WeightVersion(), WeightVersion(step=1)
"""The versions before and after the push."""


def parity_finding(report: StepReport, *, is_float32: bool) -> Finding:
    """Report the difference between engine and trainer on the same tokens under the same weights."""
    mean, most = report.metrics["logp_diff_mean"], report.metrics["logp_diff_max"]
    number, sample = int(report.metrics["num_loss_tokens"]), report.metrics["effective_sample_size"]
    found = (
        f"the log-probabilities of engine and trainer (transformers) differ by {mean:.2g} nats on average and "
        f"{most:.2g} at most, over {number} tokens; the effective sample size of the importance weights is {sample:.3f}"
    )
    if not mean <= FAR:  # NaN, too
        change = "they do not compute the same model: compare folders and temperatures"
        return Finding("parity", State.FAIL, found, change)
    if most > CLOSE if is_float32 else mean > NEAR:
        change = "see that neither rounds more than it must (dtype, quantisation)"
        return Finding("parity", State.WARN, found, change)
    return Finding("parity", State.OK, found)


async def push_findings(
    engine: Engine, publish: Callable[[], Awaitable[Weights]], asker: Asker, transfer: str
) -> list[Finding]:
    """Push the trainer's weights under a running answer; report what that cost, and the versions of its tokens.

    Raises EngineError and TrainerError.
    """
    started_s = time.perf_counter()
    weights = await publish()
    published_s = time.perf_counter() - started_s
    num_bytes = size_of(weights)
    async with Stream(engine, asker.long(1)) as stream:
        await stream.grows()
        report = await push([engine], weights, NEXT, PauseMode.RETRACT)
        await stream.grows(beyond=stream.num_tokens + NUM_TOKENS_AFTER)
        answer = await stream.end()
    cost = (
        f"{gib(num_bytes)} by {transfer.replace('_', ' ')}: published in {published_s:.2f} s, taken in "
        f"{report.send_s:.2f} s while the engine sampled, answers held for {report.stall_s:.2f} s"
    )
    return [Finding("push", State.OK, cost), spans_finding(answer, FIRST, NEXT)]


def spans_finding(answer: GenerateResult, old: WeightVersion, new: WeightVersion) -> Finding:
    """Report whether each token names the weights that sampled it."""
    versions = [span.version for span in answer.versions]
    ends = [0, *(span.end for span in answer.versions)]
    is_gapless = ends == [*(span.start for span in answer.versions), len(answer.token_ids)]
    found = f"an answer across the push has {told_spans(answer)}"
    if is_gapless and versions == [old, new]:
        return Finding("spans", State.OK, found)
    if is_gapless and versions == [old]:
        found = f"{found}: it ended before the new weights served, so nothing was seen"
        return Finding("spans", State.WARN, found)
    return Finding("spans", State.FAIL, f"{found}, where {old}, then {new} was expected", "see the engine's log")


GROUP = "doctor"
NO_ENGINE = "--no-engine"


def batch_of(answers: Sequence[Sampled]) -> RolloutBatch:
    """Return the batch of train step 1. The first answer earned 1 and the others 0: there is something to learn."""
    trajectories = tuple(_trajectory(answer, 0.0 if number else 1.0) for number, answer in enumerate(answers))
    group = TrajectoryGroup(group_id=GROUP, task_id=GROUP, trajectories=trajectories)
    records = tuple(record for one in trajectories for record in token_records(one))
    return RolloutBatch(step=1, groups=(group,), records=records)


def _trajectory(answer: Sampled, reward: float) -> Trajectory:
    request, result = answer.request, answer.result
    completion = Completion(
        id=request.request_id,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        versions=result.versions,
        finish_reason=result.finish_reason,
        distribution=request.sampling.distribution,
    )
    turn = Turn(
        id=request.request_id,
        parent=None,
        fork_at=0,
        new_prompt_ids=tuple(request.input_ids),
        completions=(completion,),
        request_delta=(),
        sampling=request.sampling,
        started_s=0.0,
        ended_s=0.0,
    )
    return Trajectory(
        session_id=request.request_id,
        group_id=GROUP,
        task_id=GROUP,
        turns=(turn,),
        rewards=Rewards(final=reward),
        status=Status.COMPLETED,
        error=None,
        logged={},
        started_s=0.0,
        ended_s=0.0,
    )


QUESTION = {"role": "user", "content": "Count from one to twenty."}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A trial of the engine and the trainer of a config, with the model in the folder `model`."""

    config: Config
    model: Path
    renderer: Renderer
    logs: Path
    report: Report

    async def run(self, *, with_engine: bool = True) -> None:
        """Try as much as possible, `with_engine` or, for a run whose engine is here, the trainer alone."""
        async with AsyncExitStack() as stack:
            if self.config.is_online:
                await self._ask_elsewhere(stack)
            else:
                await self._try_here(stack, with_engine=with_engine)

    async def _ask_elsewhere(self, stack: AsyncExitStack) -> None:
        engine = await attempt(self.report, "engine", connect_engine(self.config.engine))
        if engine is not None:
            stack.push_async_callback(engine.aclose)
            await attempt(self.report, "engine", self._ask(engine))
        self.report.skip("interruption", "trainer", "push", why="agents are at work with that engine")

    async def _try_here(self, stack: AsyncExitStack, *, with_engine: bool) -> None:
        """Try an engine and a trainer in a run's order: where they share a GPU, the engine takes its part first."""
        in_memory = self.config.trainer.transfer == "shared_memory"
        shared_memory = stack.enter_context(weights_folder(in_memory=in_memory))
        gang = await stack.enter_async_context(start_trainer(self.config.trainer.num_threads, self.logs))
        engine, asked, why = None, None, NO_ENGINE
        if with_engine:
            weights = await asyncio.to_thread(engine_weights, self.config.trainer, self.model, None, shared_memory)
            opening = stack.enter_async_context(open_engine(self.config.engine, weights, FIRST, self.logs))
            engine = await attempt(self.report, "engine", opening, limit_s=None)  # it has a limit of its own
            why = "it needs an engine that answers as it should"
        else:
            self.report.skip("engine", why=why)
        if engine is not None:
            asked = await attempt(self.report, "engine", self._ask(engine.client))
        if engine is None or asked is None:
            self.report.skip("interruption", why=why)
        else:
            await examined(self.report, "interruption", interruption_findings(engine.client, asked[0]))
        loaded = await attempt(
            self.report, "trainer", self._load(gang, shared_memory), limit_s=self.config.trainer.startup_timeout_s
        )
        if engine is None or asked is None or loaded is None:
            self.report.skip("parity", "push", "spans", why=why if engine is None else "it needs a trainer")
            return
        asker, answers = asked
        await examined(self.report, "parity", self._train(gang.client, answers, loaded, engine.memory))
        transfer = self.config.trainer.transfer
        await examined(self.report, "push", push_findings(engine.client, gang.client.publish, asker, transfer))

    async def _ask(self, engine: ServedEngine) -> tuple[Asker, list[Sampled]]:
        """Ask an engine; return who asked, and the answers."""
        info = await engine.info()
        asker = Asker(
            prompt_ids=tuple(self.renderer.ids_of(self.renderer.render([QUESTION]))),
            stop_token_ids=self.renderer.stop_token_ids,
            temperature=self.config.rollout.temperature or 1.0,
            info=info,
        )
        if asker.room < 1:
            raise ConfigError(
                f"a short question takes {len(asker.prompt_ids)} tokens, and the engine's context has "
                f"{info.max_context_tokens}: no answer fits; raise engine.max_context_tokens"
            )
        answers = await sample(engine, asker)
        self.report.add(sampling_finding(answers, info))
        return asker, answers

    async def _load(self, gang: Gang, shared_memory: Path) -> TrainerInfo:
        config = self.config
        started_s = time.perf_counter()
        teacher = await obtain_teacher(config, self.model, self.logs, Progress(total_steps=1, mode="none"))
        without = {} if teacher else {"teacher": None}  # a server's scores batches before the trainer has them
        setup = TrainerSetup(
            model=self.model,
            teacher=teacher,
            trainer=config.trainer,
            algorithm=config.algorithm.model_copy(update=without),
            seed=config.seed,
            shared_memory=shared_memory,
            resume=False,
            num_steps=config.steps,
            shares_gpu=may_be_on(config.engine, config.trainer.num_ranks),
        )
        info = await gang.init(setup)
        ranks = f" on {config.trainer.num_ranks} ranks" if config.trainer.num_ranks > 1 else ""
        found = (
            f"{info.num_parameters:,} parameters on {info.device}{ranks}, in {time.perf_counter() - started_s:.1f} s"
        )
        self.report.add(Finding("trainer", State.OK, found))
        return info

    async def _train(
        self, trainer: TrainerClient, answers: Sequence[Sampled], info: TrainerInfo, memory: MemoryHolder | None
    ) -> list[Finding]:
        async with memory_lent(memory):
            report = await trainer.train_step(batch_of(answers))
        config, is_gpu = self.config, info.device != "cpu"
        shape = await asyncio.to_thread(ModelShape.read, self.model)
        choices = (config.engine.dtype, config.trainer.dtype)
        is_float32 = {computed_in(one, shape.hidden_size, is_gpu=is_gpu) for one in choices} == {"float32"}
        return [parity_finding(report, is_float32=is_float32)]
