"""Batches from rollouts of the run's own: its tasks, its workflow, its engine and its ledger."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.engine_control import open_engine_control
from areal_agent.commits import Beginning, commit, leases_of
from areal_agent.config import Config
from areal_agent.engine.served import ServedEngine
from areal_agent.errors import ArealAgentError
from areal_agent.eval_report import EvalAnswer, EvalReport
from areal_agent.ledger.ledger import Ledger
from areal_agent.preflight import Preflight, make_curriculum
from areal_agent.rollout.dynamic_sampling import DynamicSampling
from areal_agent.rollout.executor import RolloutStats
from areal_agent.rollout.producer import Producer, RunGroup
from areal_agent.rollout.tasks.draws import open_draws
from areal_agent.rollout.tasks.stream import TaskStream
from areal_agent.rollout.tasks.task_set import TaskSet
from areal_agent.serving import Serving, open_serving
from areal_agent.source import SourceCounts
from areal_agent.staleness import Admission
from areal_agent.types import JsonObject, RolloutBatch, Task, WeightVersion

TASKS = "tasks"
"""Where a checkpoint keeps the state of the draws."""


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

    @asynccontextmanager
    async def memory_lent(self) -> AsyncGenerator[None]:
        memory = self.serving.engine.memory
        if memory is not None:
            await memory.release_memory()
        try:
            yield
        finally:
            if memory is not None:
                await memory.resume_memory()

    async def publish(self, version: WeightVersion) -> None:
        self.producer.publish(version.step)

    async def state(self, step: int) -> JsonObject:
        return {TASKS: self.producer.tasks_state(), **await leases_of(self.ledger, step)}

    async def commit(self, step: int, checkpoint: Path) -> None:
        await commit(self.ledger, step, checkpoint)

    async def settle(self, *, is_completed: bool) -> None:
        await self.producer.settle(is_completed=is_completed)

    async def evaluate(
        self, tasks: tuple[Task, ...], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        return await self.serving.evaluate(tasks, group_id, on_answer, max_concurrent)

    async def stats(self) -> RolloutStats:
        return await self.serving.rollouts.stats()

    async def count_tokens(self) -> tuple[int, int] | None:
        return await self.ledger.count_tokens()

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
    preflight: Preflight, ledger: Ledger, *, weights: Path, tokenizer: Path, beginning: Beginning
) -> AsyncGenerator[OwnRollouts]:
    """Start an engine that serves `weights` as the version of `beginning`, and what rolls out against it."""
    assert preflight.workflow is not None  # preflight asks for one where rollouts are the run's own
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
        ) as serving,
        open_engine_control(serving.engine, url_file=folder.engines_url, key_file=folder.admin_key),
    ):
        producer = await make_producer(preflight.config, preflight.tasks, ledger, serving.run_group, beginning)
        yield OwnRollouts(serving=serving, producer=producer, ledger=ledger, batch_size=preflight.config.batch_size)


async def make_producer(
    config: Config, tasks: TaskSet, ledger: Ledger, run_group: RunGroup, beginning: Beginning
) -> Producer:
    """With what an earlier process of the run left waiting, under the state of the draws that the checkpoint kept."""
    assert config.tasks is not None  # the config has seen to it
    stream = TaskStream(tasks, seed=config.seed, shuffle=config.tasks.shuffle)
    draws = await open_draws(stream, make_curriculum(config, tasks), ledger)
    draws.restore(beginning.run_state.get(TASKS, {}))
    step = beginning.version.step
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
        trains_altered=config.rollout.train_altered,
        dynamic_sampling=make_dynamic_sampling(config),
    )
    await producer.restore(await ledger.waiting())
    return producer


def make_dynamic_sampling(config: Config) -> DynamicSampling | None:
    """None where every group is trained that can be."""
    if not config.algorithm.dynamic_sampling:
        return None
    return DynamicSampling(
        max_flat_groups=config.rollout.max_flat_groups,
        part_weights=config.algorithm.reward_parts,
        discount=config.algorithm.discount,
        compares_turns=config.algorithm.step_group_weight > 0,
        trains_altered=config.rollout.train_altered,
    )
