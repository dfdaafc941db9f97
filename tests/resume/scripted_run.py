"""A whole run without torch, that can be killed: the real ledger, gateway, workflows, producer, push and commit code
around the scripted engine; in the trainer's place a list of the sessions that it has trained.

Its weights are that list. So what a checkpoint was trained on can be read in it, and held against the ledger.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from areal_agent.config import Config
from areal_agent.engine.fake import FakeEngine, Script
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.local import LocalSettings, RolloutExecutor, open_local
from areal_agent.rollout.producer import Producer, run_all, sibling_specs
from areal_agent.run.preflight import Preflight
from areal_agent.run.sources import TASKS, Beginning, begin, leases_of, make_producer
from areal_agent.trainer.checkpoint import CommitPoint, Passing, pass_by, publish_checkpoint
from areal_agent.types import DiskWeights, GenerateRequest, RolloutBatch, Task, TrajectoryGroup, WeightVersion
from areal_agent.weights.push import push

CHECKPOINT_EVERY = 2
WEIGHTS = "weights.json"


async def solve(task: Any, rollout: Any) -> float:
    """One or two turns, as the seed says."""
    messages = list(task["messages"])
    for _ in range(1 + rollout.seed % 2):
        reply = await rollout.client.chat.completions.create(model=rollout.model, messages=messages)
        text = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    return float(rollout.seed % 3)


def make_config(folder: Path, num_steps: int) -> Config:
    tasks = folder / "tasks.jsonl"
    lines = ({"id": str(n), "messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(20))
    tasks.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    return Config.parse(
        {
            "model": "tiny",  # of which nothing but the tokenizer is used
            "tasks": str(tasks),
            "run_dir": str(folder / "run"),
            "steps": num_steps,
            "batch_size": 2,
            "group_size": 2,
            "max_staleness": 2,
            "straggler": "wait",
            "eval": {"num_tasks": 0},
        }
    )


@dataclass(kw_only=True)
class ScriptedTrainer:
    """Its weights are the sessions that it was trained on, in order."""

    directory: Path
    passing: Passing
    weights: list[str] = field(default_factory=list[str])

    @classmethod
    def load(cls, directory: Path, beginning: Beginning, passing: Passing) -> "ScriptedTrainer":
        trainer = cls(directory=directory, passing=passing)
        if beginning.checkpoint is not None:
            trainer.weights = orjson.loads((beginning.checkpoint.path / WEIGHTS).read_bytes())
        return trainer

    def train_step(self, batch: RolloutBatch) -> None:
        self.weights += [one.session_id for one in batch.trained]
        self.passing(CommitPoint.TRAINED)

    def save(self, version: WeightVersion, run_state: dict[str, Any], weights: list[str]) -> Path:
        def write(folder: Path) -> None:
            (folder / WEIGHTS).write_bytes(orjson.dumps(weights))

        return publish_checkpoint(
            self.directory,
            step=version.step,
            incarnation=version.incarnation,
            run_state=run_state,
            write=write,
            keep_last=2,
            passing=self.passing,
        ).path


@dataclass(kw_only=True)
class ScriptedRun:
    """One process of the run."""

    config: Config
    ledger: Ledger
    producer: Producer
    trainer: ScriptedTrainer
    engine: FakeEngine
    version: WeightVersion
    passing: Passing
    saving: asyncio.Task[None] | None = None

    async def step(self, num_groups: int) -> None:
        """Take a batch, train it, and let the engine serve what came of it."""
        batch = await self.producer.take(self.version.step + 1, num_groups)
        self.passing(CommitPoint.LEASED)
        self.trainer.train_step(batch)
        self.version = WeightVersion(incarnation=self.version.incarnation, step=batch.step)
        await push([self.engine], DiskWeights(path="list"), self.version)
        self.producer.publish(self.version.step)
        self.passing(CommitPoint.PUSHED)

    async def save(self) -> None:
        """Begin a save beside the next steps, once the one before has ended."""
        await self.saved()
        run_state = {TASKS: self.producer.draws.state(), **await leases_of(self.ledger, self.version.step)}
        self.saving = asyncio.create_task(self._save(self.version, run_state, list(self.trainer.weights)))

    async def saved(self) -> None:
        if self.saving is not None:
            await self.saving

    async def _save(self, version: WeightVersion, run_state: dict[str, Any], weights: list[str]) -> None:
        path = await asyncio.to_thread(self.trainer.save, version, run_state, weights)
        await self.ledger.commit_checkpoint(version.step, str(path))
        self.passing(CommitPoint.COMMITTED)


def answer(request: GenerateRequest) -> list[int]:
    """Depends on the whole prompt, so that no two answers of a conversation are alike."""
    start = 10 + sum(request.input_ids) % 40
    return [start, start + 1, start + 2]


@dataclass(kw_only=True)
class Stage:
    """What a scripted run goes on with: from the newest checkpoint in its folder."""

    config: Config
    ledger: Ledger
    beginning: Beginning
    engine: FakeEngine
    producer: Producer


@asynccontextmanager
async def open_stage(
    folder: Path,
    model: Path,
    make_engine: Callable[[WeightVersion], FakeEngine],
    *,
    num_steps: int,
    workflow: Any = solve,
    max_concurrent: int = 8,
    passing: Passing = pass_by,
) -> AsyncGenerator[Stage]:
    """Open the ledger, a gateway before the engine, the workflows and their producer."""
    config = make_config(folder, num_steps)
    preflight = Preflight.check(config, workflow=workflow)
    ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
    beginning = await begin(ledger, folder / "checkpoints", passing)
    engine = make_engine(beginning.version)
    settings = LocalSettings(
        model_name="scripted",
        tokenizer=model,
        port=0,
        max_concurrent=max_concurrent,
        rollout=config.rollout,
        sandbox=config.sandbox,
    )
    assert preflight.workflow is not None
    async with open_local(
        settings, preflight.workflow, engine=engine, info=engine.info(), journal=ledger.own
    ) as rollouts:
        run_group = run_group_by(rollouts, ledger, config)
        producer = await make_producer(config, preflight.tasks, ledger, run_group, beginning)
        yield Stage(config=config, ledger=ledger, beginning=beginning, engine=engine, producer=producer)
    await ledger.aclose()


async def live(folder: Path, model: Path, num_steps: int, passing: Passing = pass_by, script: Script = answer) -> None:
    """One process of the run: from where the last one died to `num_steps`, and then what is left over, to the end."""

    def make_engine(version: WeightVersion) -> FakeEngine:
        return FakeEngine(script, version=version, max_context_tokens=4096)

    async with open_stage(folder, model, make_engine, num_steps=num_steps, passing=passing) as stage:
        run = ScriptedRun(
            config=stage.config,
            ledger=stage.ledger,
            producer=stage.producer,
            trainer=ScriptedTrainer.load(folder / "checkpoints", stage.beginning, passing),
            engine=stage.engine,
            version=stage.beginning.version,
            passing=passing,
        )
        producing = asyncio.create_task(run.producer.admit_forever())
        await _train(run)
        async with run.producer.drained():
            await _train_the_rest(run)
        producing.cancel()
        await asyncio.wait({producing})
        await run.save()
        await run.save()  # a second checkpoint of the same step: the first one steps aside
        await run.saved()
        await run.producer.settle(is_completed=True)
        await run.ledger.set_note("status", "completed")


async def _train(run: ScriptedRun) -> None:
    while run.version.step < run.config.steps:
        await run.step(run.config.batch_size)
        if run.version.step % CHECKPOINT_EVERY == 0:
            await run.save()


async def _train_the_rest(run: ScriptedRun) -> None:
    """Nobody rolls out any more: what has finished is trained, so that nothing is left over."""
    while len(run.producer.ready):
        await run.step(min(run.config.batch_size, len(run.producer.ready)))


def run_group_by(rollouts: RolloutExecutor, ledger: Ledger, config: Config) -> Any:
    async def run_group(group_id: str, task: Task) -> TrajectoryGroup:
        specs = sibling_specs(group_id, task, config.group_size, config.seed)
        ended = await run_all(rollouts.run, specs)
        trajectories = [await ledger.trajectory(one.session_id) for one in ended]
        return TrajectoryGroup(group_id=group_id, task_id=task.id, trajectories=tuple(trajectories))

    return run_group
