"""The sources of a run's batches: the `Source` protocol and its two implementations, and where a run goes on.

::

    OwnRollouts     tasks ─▶ Producer ─▶ Serving (engine, gateway, workflows) ─▶ Producer ─▶ batch
    OnlineRollouts  agents elsewhere ─▶ gateway elsewhere ── lease ─▶ batch

Online, agents, engine and ledger belong to a gateway that stands alone. A batch comes by lease; the weights go to the
engine behind that gateway; a published version moves the gateway's staleness bound, and a checkpoint acknowledges the
leases. The gateway may be gone for a while: every call is repeated.

After a crash a run goes on where the commits of its train steps have come to: the checkpoint first, then the ledger::

    lease ─▶ train ─▶ push ─▶ checkpoint published, with the leases behind it ─▶ committed in the ledger
    start ─▶ folder claimed ─▶ recovered ─▶ the newest checkpoint that the ledger knows ─▶ later leases returned

A run has a name at the gateway, kept in its own ledger. A new run takes the gateway over from the one before: what that
one trained stays trained, and waiting answers go to the new one.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from areal_agent.cluster.engines import open_engine_control
from areal_agent.cluster.hosts import Hosts
from areal_agent.config import Config
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.fleet.member import ServedEngine
from areal_agent.errors import ArealAgentError, ConfigError, EngineError, GatewayError
from areal_agent.files import claim, require_claim
from areal_agent.gateway.auth import find_admin_key
from areal_agent.gateway.metrics import add_up
from areal_agent.gateway.online.wire import GatewayStatus, State
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.protocols import MemoryHolder
from areal_agent.rollout.config import ALTERED
from areal_agent.rollout.draws import TaskStream, open_draws
from areal_agent.rollout.local import RolloutStats
from areal_agent.rollout.online import OnlineGateway
from areal_agent.rollout.producer import DynamicSampling, Producer, RunGroup
from areal_agent.rollout.tasks import TaskSet
from areal_agent.run.preflight import Preflight, make_curriculum
from areal_agent.run.serving import EvalAnswer, EvalReport, Serving, open_serving
from areal_agent.staleness import Admission
from areal_agent.trainer.checkpoint import Checkpoint, CommitPoint, Passing, intact_checkpoints, pass_by, recover
from areal_agent.types import Drop, JsonObject, RolloutBatch, Task, WeightVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCounts:
    """The number of rollouts that are running and finished now, and what has happened to all of them."""

    running: int
    finished: int
    statuses: Mapping[str, int]
    drops: Mapping[str, int]


class Source(Protocol):
    """Gives batches to a run. `engine` is where the weights have to go."""

    @property
    def engine(self) -> ServedEngine: ...

    async def produce(self) -> None:
        """Let rollouts be made, until cancelled."""
        ...

    async def take(self, step: int) -> RolloutBatch:
        """Return the batch for train step `step`, leased: whole groups within the staleness bound."""
        ...

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        """Roll out exactly these tasks, now. Raises ConfigError where somebody else chooses the tasks."""
        ...

    def drained(self) -> AbstractAsyncContextManager[None]:
        """Wait on entering for the rollouts under way to end; inside, none begins."""
        ...

    def memory_lent(self) -> AbstractAsyncContextManager[None]:
        """Inside, the engine gives up its memory for keys and values, where the config asks for that."""
        ...

    async def publish(self, version: WeightVersion) -> None:
        """Move the staleness bound: this version serves now."""
        ...

    async def state(self, step: int) -> JsonObject:
        """Return the state of this side for the checkpoint of `step`; a run that resumes from there gets it back."""
        ...

    async def commit(self, step: int, checkpoint: Path) -> None:
        """Record that a checkpoint is safe: everything leased up to its step is trained."""
        ...

    async def settle(self, *, is_completed: bool) -> None:
        """Give every unfinished rollout its fate, at the end of a run."""
        ...

    async def evaluate(
        self, tasks: Sequence[Task], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        """Roll out every task once, and those of the run's benchmarks, at most `max_concurrent` at a time."""
        ...

    async def stats(self) -> RolloutStats: ...

    async def count_tokens(self) -> tuple[int, int] | None:
        """Return the ledger's counts of tokens sampled for training, and trained in the current lineage.

        None when that ledger is a gateway's elsewhere.
        """
        ...

    @property
    def ledger_elsewhere(self) -> str | None:
        """The path of the gateway's ledger on its machine; None when the rollouts are in the run's own."""
        ...

    def counts(self) -> SourceCounts: ...

    def process_ids(self) -> Mapping[str, int]:
        """Return the ids of this side's processes on this machine, by name."""
        ...

    def failures(self) -> Mapping[str, Awaitable[ArealAgentError]]:
        """Return awaitables by part: each waits until that part has failed, and returns the error."""
        ...


TASKS, LEASES, LEASED_AFTER = "tasks", "leases", "leased_after"
"""The keys under which a checkpoint keeps the state of the draws, and the sessions leased since the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """The checkpoint and version at which one process of a run begins."""

    checkpoint: Checkpoint | None  # None: begin with the initial model
    version: WeightVersion

    @property
    def run_state(self) -> JsonObject:
        """The state that the run had given the checkpoint to keep."""
        return self.checkpoint.run_state() if self.checkpoint else {}


async def begin(ledger: Ledger, directory: Path, passing: Passing = pass_by) -> Beginning:
    """Find the checkpoint to go on from, and begin an incarnation there. The caller holds the ledger's lock.

    Leases in the checkpoint are trained, even when the crash came before the ledger was told; later leases wait again.
    The incarnation claims the directory first. Raises TakenOver when one that the ledger does not know of has done so.
    """
    known = await ledger.ask(questions.newest_incarnation)
    require_claim(directory, known)
    await ledger.set_note(questions.CLAIM_NOTE, known + 1)  # first, so that a process that dies in between may resume
    await asyncio.to_thread(claim, directory, known + 1)
    await asyncio.to_thread(recover, directory)
    passing(CommitPoint.RECOVERED)
    checkpoint = await _living(ledger, directory)
    step = checkpoint.step if checkpoint else 0
    incarnation = await ledger.begin_incarnation(step, at_least=known + 1)
    passing(CommitPoint.RESTARTED)
    return Beginning(checkpoint=checkpoint, version=WeightVersion(incarnation=incarnation.number, step=step))


async def leases_of(ledger: Ledger, step: int) -> dict[str, Any]:
    """Return what the checkpoint of `step` keeps of the ledger."""
    after = await ledger.ask(questions.last_checkpoint, before=step)
    return {LEASED_AFTER: after, LEASES: await ledger.ask(questions.leases, after, step)}


async def _living(ledger: Ledger, directory: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint of the current lineage: the one whose leases agree with the ledger's."""
    checkpoints = intact_checkpoints(directory)
    while (checkpoint := await asyncio.to_thread(next, checkpoints, None)) is not None:
        state = checkpoint.run_state()
        if LEASES not in state:  # the ledger with the leases is a gateway's elsewhere
            return checkpoint
        known = await ledger.ask(questions.leases, state[LEASED_AFTER], checkpoint.step)
        if known == state[LEASES]:
            return checkpoint
        logger.warning(
            "passing over the checkpoint %s: its leases are not those of the ledger for its steps, so it is of an "
            "abandoned lineage or of another run",
            checkpoint.path,
        )
    return None


@asynccontextmanager
async def memory_lent(memory: MemoryHolder | None) -> AsyncGenerator[None]:
    """Inside, an engine that holds memory for keys and values gives it up."""
    if memory is None:
        yield
        return
    await memory.release_memory()
    try:
        yield
    finally:
        await memory.resume_memory()


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRollouts:
    """A `Source`: the run's own engine, gateway, workflows and ledger."""

    serving: Serving
    producer: Producer
    ledger: Ledger
    batch_size: int

    @property
    def engine(self) -> ServedEngine:
        return self.serving.engine.client

    async def produce(self) -> None:
        await self.producer.admit_forever()

    async def take(self, step: int) -> RolloutBatch:
        return await self.producer.take(step, self.batch_size)

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        return await self.producer.roll_out(step, tasks)

    def drained(self) -> AbstractAsyncContextManager[None]:
        return self.producer.drained()

    def memory_lent(self) -> AbstractAsyncContextManager[None]:
        return memory_lent(self.serving.engine.memory)

    async def publish(self, version: WeightVersion) -> None:
        self.producer.publish(version.step)

    async def state(self, step: int) -> JsonObject:
        return {TASKS: self.producer.draws.state(), **await leases_of(self.ledger, step)}

    async def commit(self, step: int, checkpoint: Path) -> None:
        await self.ledger.commit_checkpoint(step, str(checkpoint))

    async def settle(self, *, is_completed: bool) -> None:
        await self.producer.settle(is_completed=is_completed)

    async def evaluate(
        self, tasks: Sequence[Task], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        return await self.serving.evaluate(tasks, group_id, on_answer, max_concurrent)

    async def stats(self) -> RolloutStats:
        return await self.serving.rollouts.stats()

    async def count_tokens(self) -> tuple[int, int] | None:
        return await self.ledger.ask(questions.count_tokens)

    @property
    def ledger_elsewhere(self) -> str | None:
        return None

    def counts(self) -> SourceCounts:
        admission, counts = self.producer.admission, self.producer.counts
        return SourceCounts(
            running=admission.running, finished=admission.finished, statuses=counts.statuses, drops=counts.drops
        )

    def process_ids(self) -> Mapping[str, int]:
        servers = self.serving.engine.servers
        return {} if servers is None else servers.process_ids()

    def failures(self) -> Mapping[str, Awaitable[ArealAgentError]]:
        return {"engines": self.serving.engine.failure(), "rollouts": self.serving.rollouts.failure()}


@asynccontextmanager
async def open_own_rollouts(
    preflight: Preflight, ledger: Ledger, hosts: Hosts, *, weights: Path, tokenizer: Path, beginning: Beginning
) -> AsyncGenerator[OwnRollouts]:
    """Start an engine that serves `weights` as the version of `beginning`, and what rolls out against it."""
    assert preflight.workflow is not None  # preflight requires one where rollouts are the run's own
    folder = preflight.folder
    async with (
        open_serving(
            preflight.config,
            preflight.workflow,
            ledger,
            workflow_path=preflight.workflow_path,
            weights=weights,
            tokenizer=tokenizer,
            version=beginning.version,
            logs=folder.logs,
            hosts=hosts,
            benchmarks=preflight.benchmarks,
        ) as serving,
        open_engine_control(serving.engine, url_file=folder.engines_url, key_file=folder.admin_key),
    ):
        producer = await make_producer(preflight.config, preflight.tasks, ledger, serving.run_group, beginning)
        yield OwnRollouts(serving=serving, producer=producer, ledger=ledger, batch_size=preflight.config.batch_size)


async def make_producer(
    config: Config, tasks: TaskSet, ledger: Ledger, run_group: RunGroup, beginning: Beginning
) -> Producer:
    """Make a producer with the groups that an earlier process left waiting and the draws' state from the checkpoint."""
    assert config.tasks is not None  # checked by Config
    stream = TaskStream(tasks, seed=config.seed, shuffle=config.tasks.shuffle)
    draws = await open_draws(stream, make_curriculum(config, tasks), ledger)
    draws.restore(beginning.run_state.get(TASKS, {}))
    step = beginning.version.step
    dynamic_sampling = DynamicSampling(
        max_flat_groups=config.rollout.max_flat_groups,
        algorithm=config.algorithm,
        rule=config.rollout.loss_rule,
    )
    producer = Producer(
        run_group=run_group,
        draws=draws,
        ledger=ledger,
        admission=Admission(
            batch_answers=config.batch_answers,
            max_staleness=config.max_staleness,
            step=step,
            consumed=step * config.batch_answers,
        ),
        group_size=config.group_size,
        straggler=config.straggler,
        straggler_wait_s=config.rollout.straggler_wait_s,
        max_concurrent=config.rollout.max_concurrent,
        max_failed_groups=config.rollout.max_failed_groups,
        rule=config.rollout.loss_rule,
        dynamic_sampling=dynamic_sampling if config.algorithm.dynamic_sampling else None,
    )
    await producer.restore(await ledger.ask(questions.waiting))
    return producer


LEASE_WAIT_S = 30.0
"""The time that one call for a batch waits at the gateway before it is made again."""

TRAINER_NOTE = "online_trainer"
"""The note in the run's ledger with the run's name at the gateway."""


@dataclass(kw_only=True, slots=True)
class OnlineRollouts:
    """A `Source`: a gateway that stands alone; its agents, its engine and its ledger are somebody else's."""

    config: Config
    engine: ServedEngine
    gateway: OnlineGateway
    step: int  # the version that was published last
    lease_wait_s: float = LEASE_WAIT_S
    _has_warned: bool = False
    _state: State | None = None
    _last: GatewayStatus | None = None
    _earlier: list[GatewayStatus] = field(default_factory=list[GatewayStatus])  # of gateway processes that ended

    async def produce(self) -> None:
        """Do nothing: agents elsewhere produce."""

    async def take(self, step: int) -> RolloutBatch:
        config = self.config
        straggler_wait_s = config.rollout.straggler_wait_s if config.straggler == "wait" else 0.0
        while True:
            before = self._state.drops if self._state else {}
            batch, self._state = await self.gateway.lease(
                step,
                num_groups=config.batch_size,
                wait_s=self.lease_wait_s,
                straggler_wait_s=straggler_wait_s,
                train_roots=config.rollout.train_roots,
            )
            if batch is not None:
                return batch
            self._warn_of_drops(step, Counter(self._state.drops) - Counter(before))
            self._warn_if_idle(step, self._state)

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        raise ConfigError("rollout_batch needs the run's own rollouts; with rollout.gateway_url call prepare_batch")

    def drained(self) -> AbstractAsyncContextManager[None]:
        raise ConfigError("engine.on_push 'drain' needs the run's own rollouts; leave it out")

    def memory_lent(self) -> AbstractAsyncContextManager[None]:
        """The engine is somebody else's and keeps its memory."""
        return contextlib.nullcontext()

    async def publish(self, version: WeightVersion) -> None:
        self._state = await self.gateway.publish(
            version.step,
            incarnation=version.incarnation,
            batch_answers=self.config.batch_answers,
            max_staleness=self.config.max_staleness,
        )
        self.step = version.step

    async def state(self, step: int) -> JsonObject:
        """Return nothing: the gateway keeps tasks and leases."""
        return {}

    async def commit(self, step: int, checkpoint: Path) -> None:
        if step > 0:
            await self.gateway.acknowledge(step, str(checkpoint))

    async def settle(self, *, is_completed: bool) -> None:
        """Give back a batch that was asked for and never came. Waiting answers stay for the next trainer."""
        await self.gateway.give_back(self.step)

    async def evaluate(
        self, tasks: Sequence[Task], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        raise ConfigError("evaluation needs a workflow; with rollout.gateway_url a run has none")

    async def stats(self) -> RolloutStats:
        """Add up over all processes that the gateway has been since the run began: a restarted one counts from zero."""
        status = await self.gateway.status()
        if self._last is not None and status.stats.sent_bytes < self._last.stats.sent_bytes:
            self._earlier.append(self._last)
        self._last, self._state = status, status.state
        lives = [*self._earlier, status]
        return RolloutStats(
            gateway=add_up([life.stats for life in lives]),
            rolling_s=sum(life.state.rolling_s for life in lives),
            loop_blocked_s=0.0,
        )

    async def count_tokens(self) -> tuple[int, int] | None:
        return None

    @property
    def ledger_elsewhere(self) -> str | None:
        return None if self._last is None else self._last.ledger

    def counts(self) -> SourceCounts:
        assert self._state is not None  # a version was published before any batch
        return SourceCounts(
            running=self._state.num_running,
            finished=self._state.num_finished,
            statuses=self._state.statuses,
            drops=self._state.drops,
        )

    def process_ids(self) -> Mapping[str, int]:
        """Return none: its processes are elsewhere."""
        return {}

    def failures(self) -> Mapping[str, Awaitable[ArealAgentError]]:
        """Return none: a gateway may be gone for a while, and a call that fails raises by itself."""
        return {}

    def _warn_of_drops(self, step: int, drops: Counter[str]) -> None:
        """Warn of rollouts that were dropped while the step waits for its batch: its line may never come."""
        if drops:
            named = ", ".join(f"{number} {reason}" for reason, number in drops.items())
            altered = f"; the altered ones have only tokens that are {ALTERED}" if drops[Drop.ALTERED] else ""
            logger.warning("no batch for step %d yet; the gateway dropped rollouts: %s%s", step, named, altered)

    def _warn_if_idle(self, step: int, state: State) -> None:
        """Warn once why no batch comes: no agent plays, or they play groups of another size."""
        if self._has_warned or state.num_running > 0:
            return
        self._has_warned = True
        logger.warning(
            "no batch for step %d within %g s, and no agent plays at %s: %d answers wait there, and %s more may start; "
            "a step takes %d groups of %d (batch_size, group_size). Start agents that play groups of %d",
            step,
            self.lease_wait_s,
            self.gateway.url,
            state.num_finished,
            state.capacity,
            self.config.batch_size,
            self.config.group_size,
            self.config.group_size,
        )


@asynccontextmanager
async def open_online_rollouts(config: Config, ledger: Ledger, step: int) -> AsyncGenerator[OnlineRollouts]:
    """Connect, and let what was leased after the checkpoint of `step` wait again. Raises ConfigError.

    `ledger` is the run's own.
    """
    assert config.rollout.gateway_url is not None  # checked by Config
    async with AsyncExitStack() as stack:
        engine = await connect_engine(config.engine)
        stack.push_async_callback(engine.aclose)
        admin_key = find_admin_key(config.rollout.gateway_admin_key_file, os.environ)
        trainer = await trainer_name(ledger)
        gateway = OnlineGateway(config.rollout.gateway_url, admin_key, trainer=trainer)
        stack.push_async_callback(gateway.aclose)
        try:
            await gateway.check()
        except GatewayError as error:
            raise ConfigError(f"rollout.gateway_url: {error}") from error
        served = (await engine.info()).weight_version
        await take_over(gateway, trainer, step, served)
        yield OnlineRollouts(config=config, engine=engine, gateway=gateway, step=step)


async def connect_engine(config: EngineConfig) -> ServedEngine:
    """Connect to the engine behind the gateway, whichever kind it is. Raises ConfigError.

    It is not wrapped in a fleet, which would restore its own weights where another trainer has taken the engine over.
    """
    assert config.url is not None  # checked by Config
    try:
        address = await EngineAddress.of_server(config.url)
        if config.backend not in ("embedded", address.backend):
            raise ConfigError(
                f"engine.backend is {config.backend!r}, but the engine at engine.url = {config.url} is "
                f"{address.backend}; leave engine.backend out"
            )
        engine = address.client()(config.url)
        try:
            await engine.info()
        except BaseException:
            await engine.aclose()
            raise
    except EngineError as error:
        raise ConfigError(f"engine.url: {error}") from error
    return engine


async def trainer_name(ledger: Ledger) -> str:
    """Return the run's name at a gateway; it is the same whenever the run is resumed."""
    name = await ledger.ask(questions.note, TRAINER_NOTE)
    if name is None:
        name = f"run-{secrets.token_hex(8)}"
        await ledger.set_note(TRAINER_NOTE, name)
    return str(name)


async def take_over(gateway: OnlineGateway, trainer: str, step: int, served: WeightVersion) -> None:
    """Take the gateway over at the checkpoint of `step`; warn when another trainer has trained there.

    What an engine serves before any push is the model's own weights, which are also those of a run's step 0: then
    these labels are the run's own, so that what agents played before the first trainer came is trained.
    """
    found = (await gateway.status()).state
    num_returned = await gateway.give_back(step, adopt=True)
    if step == 0 and served == WeightVersion():
        await gateway.publish(0, incarnation=served.incarnation)
    if found.trainer != trainer and (found.trainer or found.leased):
        logger.warning(
            "the gateway at %s has served %s up to step %d: what was trained stays trained; this run takes over "
            "the %d answers that wait there, of which %d were leased and never trained",
            gateway.url,
            f"trainer {found.trainer}" if found.trainer else "a nameless trainer",
            found.leased,
            found.num_finished + num_returned,
            num_returned,
        )
