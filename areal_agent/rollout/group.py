"""The siblings of one task: run together, gathered by id. It knows nothing of staleness."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal_agent.rollout.runner import RolloutSpec
from areal_agent.types import SessionPurpose, Task

Result = TypeVar("Result")


def rollout_seed(run_seed: int, *names: str) -> int:
    """A seed in [0, 2**63) that depends on the run's seed and the names alone, not on the order of events."""
    text = "/".join((str(run_seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def sibling_specs(group_id: str, task: Task, group_size: int, run_seed: int) -> tuple[RolloutSpec, ...]:
    """The G rollouts of one training group, each with a seed of its own."""
    return tuple(
        RolloutSpec(
            session_id=f"{group_id}-{index}",
            group_id=group_id,
            task=task,
            seed=rollout_seed(run_seed, group_id, str(index)),
            purpose=SessionPurpose.TRAIN,
        )
        for index in range(group_size)
    )


async def run_all(
    run: Callable[[RolloutSpec], Coroutine[Any, Any, Result]], specs: tuple[RolloutSpec, ...]
) -> tuple[Result, ...]:
    """Run rollouts at once; when one of them raises (the gateway is gone), so does this; the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(spec)) for spec in specs]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in running)
