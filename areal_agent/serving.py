"""The half of a run that rolls out: one engine, one gateway, one runner. Training adds to it, evaluation is it.

runner ── HTTP ──▶ gateway ── HTTP ──▶ engine process
                      └──▶ ledger
"""

import asyncio
import secrets
import statistics
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from areal_agent.cluster.local import start_engine
from areal_agent.config import Config
from areal_agent.engine.http import HttpEngine
from areal_agent.gateway.app import Gateway
from areal_agent.ledger.ledger import Ledger
from areal_agent.process import ManagedProcess
from areal_agent.rollout.clients import open_clients
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.group import rollout_seed, run_all, sibling_specs
from areal_agent.rollout.runner import RolloutRunner, RolloutSpec
from areal_agent.rollout.workflow import Workflow
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import SessionPurpose, Status, Task, TrajectoryGroup, WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """An evaluation: `success` is the share of all tasks whose total reward reached `eval.success_reward`."""

    success: float
    reward_mean: float  # over the rollouts that have a reward
    num_tasks: int
    num_failed: int  # rollouts without a reward: they count as no success


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What rolls out. Made by `open_serving`."""

    config: Config
    ledger: Ledger
    engine: HttpEngine
    engine_process: ManagedProcess
    gateway: Gateway
    runner: RolloutRunner

    async def run_group(self, group_id: str, task: Task) -> TrajectoryGroup:
        """Roll out the siblings of one task."""
        specs = sibling_specs(group_id, task, self.config.group_size, self.config.seed)
        await run_all(self.runner.run, specs)
        trajectories = [await self.ledger.trajectory(spec.session_id) for spec in specs]
        return TrajectoryGroup(group_id=group_id, task_id=task.id, trajectories=tuple(trajectories))

    async def evaluate(self, tasks: tuple[Task, ...], group_id: str, on_done: Callable[[], None]) -> EvalReport:
        """Roll out every task once; a task's seed depends on the run's seed and its place alone."""
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

        async def reward_of(spec: RolloutSpec) -> float | None:
            status = await self.runner.run(spec)
            on_done()
            if status is not Status.COMPLETED:
                return None
            return (await self.ledger.trajectory(spec.session_id)).rewards.total

        rewards = await run_all(reward_of, specs)
        scored = [reward for reward in rewards if reward is not None]
        num_successes = sum(reward >= self.config.eval.success_reward for reward in scored)
        return EvalReport(
            success=num_successes / max(1, len(rewards)),
            reward_mean=statistics.fmean(scored) if scored else 0.0,
            num_tasks=len(rewards),
            num_failed=len(rewards) - len(scored),
        )


@asynccontextmanager
async def open_serving(
    config: Config,
    workflow: Workflow,
    ledger: Ledger,
    *,
    weights: Path,
    tokenizer: Path,
    version: WeightVersion,
    logs: Path,
) -> AsyncGenerator[Serving]:
    """Start an engine that serves `weights` as `version`, a gateway before it and a runner before that."""
    async with AsyncExitStack() as stack:
        process, engine = await stack.enter_async_context(start_engine(config.engine, weights, version, logs))
        info = await engine.info()
        admin_key = secrets.token_urlsafe(32)
        gateway = Gateway(
            sampler=engine,
            renderer=await asyncio.to_thread(Renderer.load, tokenizer),
            journal=ledger,
            model_name=config.model,
            admin_key=admin_key,
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
        )
        served = await gateway.serve("127.0.0.1", config.rollout.gateway_port)
        stack.push_async_callback(served.aclose)
        runner = RolloutRunner(
            workflow,
            gateway_url=served.base_url,
            admin_key=admin_key,
            model=config.model,
            clients=await stack.enter_async_context(open_clients()),
            shared=await stack.enter_async_context(SharedResources()),
            max_concurrent=config.rollout.max_concurrent,
            timeout_s=config.rollout.timeout_s,
            sampling={"temperature": config.rollout.temperature, "max_tokens": config.rollout.max_tokens},
            sandbox=config.sandbox.model_dump(),
        )
        yield Serving(
            config=config, ledger=ledger, engine=engine, engine_process=process, gateway=gateway, runner=runner
        )
