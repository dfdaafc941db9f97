"""The half of a run that rolls out: an engine, what runs workflows against it, and evaluations.

`open_serving` starts both. Training adds a trainer; an evaluation needs nothing else.
"""

import asyncio
import statistics
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal_agent.cluster.engines import RunningEngine, open_engine
from areal_agent.cluster.hosts import Hosts
from areal_agent.cluster.workers import open_workers, shard_name
from areal_agent.config import Config
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.process import beside
from areal_agent.rollout.local import LocalSettings, RolloutExecutor, open_local
from areal_agent.rollout.producer import run_all, sibling_specs
from areal_agent.rollout.runner import RolloutSpec, rollout_seed
from areal_agent.rollout.worker_client import WorkerSettings
from areal_agent.rollout.workflow import Workflow
from areal_agent.tokens.transcript import TRANSCRIPT_NOTE, TranscriptSettings
from areal_agent.types import SessionPurpose, Status, Task, Trajectory, TrajectoryGroup, WeightVersion


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
    """The result of an evaluation. `success` is the share of tasks whose total reward reached `eval.success_reward`."""

    success: float
    reward_mean: float  # over the rollouts that have a reward
    num_tasks: int
    num_failed: int  # rollouts without a reward, which count as no success
    answers: tuple[EvalAnswer, ...]

    @classmethod
    def of(cls, answers: Sequence[EvalAnswer], success_reward: float) -> Self:
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        return cls(
            success=sum(reward >= success_reward for reward in rewards) / max(1, len(answers)),
            reward_mean=statistics.fmean(rewards) if rewards else 0.0,
            num_tasks=len(answers),
            num_failed=len(answers) - len(rewards),
            answers=tuple(answers),
        )

    def metrics(self) -> dict[str, Any]:
        """Return its fields in metrics.jsonl; `answers_at/<step>` counts answers by the oldest weights in them."""
        oldest = Counter(answer.steps[0] for answer in self.answers if answer.steps)
        return {
            "eval/success": self.success,
            "eval/reward_mean": self.reward_mean,
            "eval/num_tasks": self.num_tasks,
            "eval/num_failed": self.num_failed,
            "eval/tokens": sum(answer.num_tokens for answer in self.answers),
            "eval/spanning": sum(len(answer.steps) > 1 for answer in self.answers),
            **{f"eval/answers_at/{step}": number for step, number in sorted(oldest.items())},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """A running engine and the executor of rollouts against it. Made by `open_serving`."""

    config: Config
    ledger: Ledger
    engine: RunningEngine
    rollouts: RolloutExecutor

    async def run_group(self, group_id: str, task: Task) -> TrajectoryGroup:
        """Roll out the siblings of one task."""
        specs = sibling_specs(group_id, task, self.config.group_size, self.config.seed)
        ended = await run_all(self.rollouts.run, specs)
        sessions = [session_id for one in ended for session_id in (one.session_id, *one.lost)]
        rollouts = [await self.ledger.ask(questions.rollout, session_id) for session_id in sessions]
        trajectories = tuple(one for of_rollout in rollouts for one in of_rollout)
        return TrajectoryGroup(group_id=group_id, task_id=task.id, trajectories=trajectories)

    async def evaluate(
        self, tasks: tuple[Task, ...], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        """Roll out every task once. A task's seed depends only on the run's seed, its id and its position."""
        specs = tuple(
            RolloutSpec(
                session_id=f"{group_id}-{number:05d}",
                group_id=group_id,
                task=task,
                seed=rollout_seed(self.config.seed, "eval", str(number), task.id),
                purpose=SessionPurpose.EVAL,
            )
            for number, task in enumerate(tasks)
        )
        slots = asyncio.Semaphore(max_concurrent)

        async def answer_of(spec: RolloutSpec) -> EvalAnswer:
            async with slots:
                ended = await self.rollouts.run(spec)
            answer = EvalAnswer.of(*await self.ledger.ask(questions.rollout, ended.session_id))
            on_answer(answer)
            return answer

        return EvalReport.of(await run_all(answer_of, specs), self.config.eval.success_reward)


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
) -> AsyncGenerator[Serving]:
    """Start an engine that serves `weights` as `version`, and what rolls out against it.

    `workflow_path` is the path by which workers import the workflow; needed with `rollout.workers`.
    """
    settings = transcript_settings(config, tokenizer)
    await asyncio.to_thread(settings.load_renderer)  # an engine takes minutes to start: first what may be wrong
    await ledger.set_note(TRANSCRIPT_NOTE, settings.note())
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_engine(config.engine, weights, version, logs, hosts))
        rollouts = await stack.enter_async_context(
            _open_workers(config, workflow_path, ledger, engine, tokenizer, logs, hosts)
            if config.rollout.workers
            else _open_here(config, workflow, ledger, engine, tokenizer)
        )
        yield Serving(config=config, ledger=ledger, engine=engine, rollouts=rollouts)


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
    config: Config, workflow: Workflow, ledger: Ledger, engine: RunningEngine, tokenizer: Path
) -> AsyncGenerator[RolloutExecutor]:
    (settings,) = _settings_of_gateways(config, tokenizer)
    client, info = engine.client, await engine.client.info()
    async with open_local(settings, workflow, engine=client, info=info, journal=ledger.own) as rollouts:
        yield rollouts


@asynccontextmanager
async def _open_workers(
    config: Config,
    workflow_path: str | None,
    ledger: Ledger,
    engine: RunningEngine,
    tokenizer: Path,
    logs: Path,
    hosts: Hosts,
) -> AsyncGenerator[RolloutExecutor]:
    assert workflow_path is not None, "preflight refuses a workflow without one"
    workers = [
        WorkerSettings(
            number=number,
            workflow=workflow_path,
            sys_path=tuple(sys.path),
            engine=engine.address,
            shard=str(ledger.shard_path(shard_name(number))),
            is_elsewhere=config.cluster.kind == "ray",
            local=settings,
        )
        for number, settings in enumerate(_settings_of_gateways(config, tokenizer))
    ]
    async with open_workers(workers, ledger, logs, hosts) as rollouts, beside(rollouts.tell_of(engine.client)):
        yield rollouts


def _settings_of_gateways(config: Config, tokenizer: Path) -> list[LocalSettings]:
    """Return the settings of each worker's gateway, or of the one in this process."""
    rollout = config.rollout
    return [
        LocalSettings(
            model_name=config.model,
            tokenizer=tokenizer,
            port=port,
            max_concurrent=num_slots,
            rollout=rollout,
            sandbox=config.sandbox,
        )
        for port, num_slots in zip(rollout.gateway_ports, rollout.slots, strict=True)
    ]
