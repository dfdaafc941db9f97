"""The half of a run that rolls out: an engine, what runs workflows against it, and evaluations.

`open_serving` starts both. Training adds a trainer; an evaluation needs nothing else.
"""

import asyncio
import statistics
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from areal_agent.cluster.engines import RunningEngine, open_engine
from areal_agent.cluster.hosts import Hosts
from areal_agent.cluster.workers import open_workers, shard_name
from areal_agent.config import Config
from areal_agent.images import IMAGES
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.process import beside
from areal_agent.rollout.local import BenchmarkSettings, LocalSettings, RolloutExecutor, open_local
from areal_agent.rollout.producer import eval_seed, run_all, sibling_specs
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.worker_client import WorkerSettings
from areal_agent.rollout.workflow import Workflow
from areal_agent.run.benchmarks import Benchmark
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings
from areal_agent.types import Drop, SessionPurpose, Status, Task, Trajectory, TrajectoryGroup, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalAnswer:
    """One rollout of an evaluation. `steps` are those of the weight versions that sampled its tokens, in order.

    There are several when a push came while it was under way.
    """

    session_id: str
    task_id: str
    reward: float | None  # None: the rollout failed
    num_tokens: int
    steps: tuple[int, ...]

    @classmethod
    def of(cls, trajectory: Trajectory, *roles: Trajectory) -> Self:
        """Describe a rollout by its own trajectory; tokens and steps are also those of its other roles."""
        every = (trajectory, *roles)
        return cls(
            session_id=trajectory.session_id,
            task_id=trajectory.task_id,
            reward=trajectory.rewards.total if trajectory.status is Status.COMPLETED else None,
            num_tokens=sum(one.num_sampled_tokens for one in every),
            steps=tuple(sorted({step for one in every for step in one.sampled_steps()})),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """The result of an evaluation. `success` is the share of answers whose total reward is a success."""

    success: float | None  # None: there are no held-out tasks
    reward_mean: float  # over the rollouts that have a reward
    num_tasks: int
    num_failed: int  # rollouts without a reward, which count as no success
    answers: tuple[EvalAnswer, ...]
    benchmarks: Mapping[str, "EvalReport"] = field(default_factory=dict[str, "EvalReport"])  # by name

    @classmethod
    def of(cls, answers: Sequence[EvalAnswer], success_reward: float) -> Self:
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        return cls(
            success=sum(reward >= success_reward for reward in rewards) / len(answers) if answers else None,
            reward_mean=statistics.fmean(rewards) if rewards else 0.0,
            num_tasks=len({answer.task_id for answer in answers}),
            num_failed=len(answers) - len(rewards),
            answers=tuple(answers),
        )

    def successes(self) -> dict[str, float]:
        """Return the success on each benchmark."""
        return {name: one.success for name, one in self.benchmarks.items() if one.success is not None}

    def metrics(self, prefix: str = "eval/") -> dict[str, Any]:
        """Return its fields in metrics.jsonl; `answers_at/<step>` counts answers by the oldest weights in them.

        Those of a benchmark begin with `eval/NAME/`.
        """
        oldest = Counter(answer.steps[0] for answer in self.answers if answer.steps)
        metrics: dict[str, Any] = {
            f"{prefix}success": self.success,
            f"{prefix}reward_mean": self.reward_mean,
            f"{prefix}num_tasks": self.num_tasks,
            f"{prefix}num_failed": self.num_failed,
            f"{prefix}tokens": sum(answer.num_tokens for answer in self.answers),
            f"{prefix}spanning": sum(len(answer.steps) > 1 for answer in self.answers),
            **{f"{prefix}answers_at/{step}": number for step, number in sorted(oldest.items())},
        }
        metrics = {} if self.success is None else metrics
        for name, one in self.benchmarks.items():
            metrics |= one.metrics(f"{prefix}{name}/")
        return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A running engine and the executor of rollouts against it. Made by `open_serving`."""

    config: Config
    ledger: Ledger
    engine: RunningEngine
    rollouts: RolloutExecutor
    benchmarks: Sequence[Benchmark] = ()

    async def run_group(self, group_id: str, task: Task) -> TrajectoryGroup:
        """Roll out the siblings of one task."""
        specs = sibling_specs(group_id, task, self.config.group_size, self.config.seed)
        ended = await run_all(self.rollouts.run, specs)
        sessions = [session_id for one in ended for session_id in (one.session_id, *one.lost)]
        await self._drop_roles_of([session_id for one in ended for session_id in one.lost])
        rollouts = [await self.ledger.ask(questions.rollout, session_id) for session_id in sessions]
        trajectories = tuple(one for of_rollout in rollouts for one in of_rollout)
        return TrajectoryGroup(group_id=group_id, task_id=task.id, trajectories=trajectories)

    async def _drop_roles_of(self, lost: Sequence[str]) -> None:
        """Drop the roles that ended before their rollout was lost: it was rolled out again, with roles of its own."""
        for session_id in lost:
            _, *roles = await self.ledger.ask(questions.rollout, session_id)
            await self.ledger.drop({one.session_id: Drop.ORPHAN for one in roles if one.fate is None})

    async def evaluate(
        self, tasks: Sequence[Task], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        """Roll out every task once, and the benchmarks' as often as these say, as `<group_id>-<benchmark>`."""
        seed = self.config.seed
        specs = eval_specs(group_id, tasks, seed)
        for one in self.benchmarks:
            specs += eval_specs(f"{group_id}-{one.name}", one.tasks, seed, one.samples, one.name)
        slots = asyncio.Semaphore(max_concurrent)

        async def answer_of(spec: RolloutSpec) -> EvalAnswer:
            async with slots:
                ended = await self.rollouts.run(spec)
            answer = EvalAnswer.of(*await self.ledger.ask(questions.rollout, ended.session_id))
            on_answer(answer)
            return answer

        answers = list(zip(specs, await run_all(answer_of, specs), strict=True))

        def report(name: str | None, success_reward: float) -> EvalReport:
            return EvalReport.of([answer for spec, answer in answers if spec.benchmark == name], success_reward)

        own = report(None, self.config.eval.success_reward)
        return replace(own, benchmarks={one.name: report(one.name, one.success_reward) for one in self.benchmarks})


def eval_specs(
    group_id: str, tasks: Sequence[Task], run_seed: int, samples: int = 1, benchmark: str | None = None
) -> list[RolloutSpec]:
    """Return the rollouts of a task set's evaluation: `<group_id>-<number>`, and `-<sample>` from the second on."""
    return [
        RolloutSpec(
            session_id=f"{group_id}-{number:05d}" + (f"-{sample}" if sample else ""),
            group_id=group_id,
            task=task,
            seed=eval_seed(run_seed, task, number, sample),
            purpose=SessionPurpose.EVAL,
            benchmark=benchmark,
        )
        for sample in range(samples)
        for number, task in enumerate(tasks)
    ]


@asynccontextmanager
async def open_serving(
    config: Config,
    workflow: Workflow,
    ledger: Ledger,
    *,
    workflow_path: str | None,
    weights: Path,
    tokenizer: Path,
    version: WeightVersion,
    logs: Path,
    hosts: Hosts,
    benchmarks: Sequence[Benchmark] = (),
) -> AsyncGenerator[Serving]:
    """Start an engine that serves `weights` as `version`, and what rolls out against it.

    `workflow_path` is the path by which workers import the workflow; needed with `rollout.workers`. `benchmarks` are
    those that it can evaluate.
    """
    settings = transcript_settings(config, tokenizer)
    await asyncio.to_thread(settings.load_renderer)  # an engine takes minutes to start: first what may be wrong
    await ledger.set_note(TRANSCRIPT_NOTE, settings.note())
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_engine(config.engine, weights, version, logs, hosts))
        gateways = _settings_of_gateways(
            config, tokenizer, ledger.path.parent / IMAGES, {one.name: one.settings for one in benchmarks}
        )
        rollouts = await stack.enter_async_context(
            _open_workers(config, gateways, workflow_path, ledger, engine, logs, hosts)
            if config.rollout.workers
            else _open_here(gateways[0], workflow, ledger, engine)
        )
        yield Serving(config=config, ledger=ledger, engine=engine, rollouts=rollouts, benchmarks=benchmarks)


def transcript_settings(config: Config, tokenizer: Path) -> TranscriptSettings:
    """Return how a run reads its sessions, with the tokenizer in this folder."""
    return TranscriptSettings(
        tokenizer=str(tokenizer.absolute()),
        history_thinking=config.rollout.history_thinking,
        tool_format=config.rollout.tool_format,
        reasoning_format=config.rollout.reasoning_format,
        trains_altered=config.rollout.train_altered,
        train_roots=config.rollout.train_roots,
        masks_truncated=config.algorithm.truncated == "mask",
    )


@asynccontextmanager
async def _open_here(
    settings: LocalSettings, workflow: Workflow, ledger: Ledger, engine: RunningEngine
) -> AsyncGenerator[RolloutExecutor]:
    client, info = engine.client, await engine.client.info()
    async with open_local(settings, workflow, engine=client, info=info, journal=ledger.own) as rollouts:
        yield rollouts


@asynccontextmanager
async def _open_workers(
    config: Config,
    gateways: Sequence[LocalSettings],
    workflow_path: str | None,
    ledger: Ledger,
    engine: RunningEngine,
    logs: Path,
    hosts: Hosts,
) -> AsyncGenerator[RolloutExecutor]:
    assert workflow_path is not None, "preflight refuses a workflow without one"
    info = await engine.client.info()
    workers = [
        WorkerSettings(
            number=number,
            workflow=workflow_path,
            sys_path=tuple(sys.path),
            engine=engine.address,
            info=info,
            shard=str(ledger.shard_path(shard_name(number))),
            is_elsewhere=config.cluster.kind == "ray",
            local=settings,
        )
        for number, settings in enumerate(gateways)
    ]
    async with open_workers(workers, ledger, logs, hosts) as rollouts, beside(rollouts.tell_of(engine.client)):
        yield rollouts


def _settings_of_gateways(
    config: Config, tokenizer: Path, images: Path, benchmarks: Mapping[str, BenchmarkSettings]
) -> list[LocalSettings]:
    """Return the settings of each worker's gateway, or of the one in this process."""
    rollout = config.rollout
    is_elsewhere = bool(rollout.workers) and config.cluster.kind == "ray"
    return [
        LocalSettings(
            model_name=config.model,
            tokenizer=tokenizer,
            images=None if is_elsewhere else images,
            port=port,
            max_concurrent=num_slots,
            rollout=rollout,
            sandbox=config.sandbox,
            benchmarks=benchmarks,
        )
        for port, num_slots in zip(rollout.gateway_ports, rollout.slots, strict=True)
    ]
