"""Small histories for tests: rollouts of one turn with one answer, whose tokens were sampled under given versions."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from areal_agent import Completion, Rewards, RolloutBatch, Status, TokenRecord, Trajectory, TrajectoryGroup, Turn
from areal_agent.ledger.ledger import Ledger
from areal_agent.types import (
    Distribution,
    FinishReason,
    SamplingParams,
    SessionPurpose,
    SessionRecord,
    VersionSpan,
    WeightVersion,
)


def batch_of(trajectories: Sequence[Trajectory], records: Sequence[TokenRecord], step: int = 5) -> RolloutBatch:
    """Return a batch with one group for each group id."""
    group_ids = dict.fromkeys(one.group_id for one in trajectories)
    groups = tuple(
        TrajectoryGroup(
            group_id=group_id,
            task_id=next(one.task_id for one in trajectories if one.group_id == group_id),
            trajectories=tuple(one for one in trajectories if one.group_id == group_id),
        )
        for group_id in group_ids
    )
    return RolloutBatch(step=step, groups=groups, records=tuple(records))


def completion(id: str, versions: Sequence[int], **changes: Any) -> Completion:
    """Return an answer with one token for each version, given as the weights' step; equal neighbours share a span."""
    runs = [(step, list(places)) for step, places in groupby(range(len(versions)), versions.__getitem__)]
    made = Completion(
        id=id,
        token_ids=tuple(range(len(versions))),
        logprobs=(-0.5,) * len(versions),
        versions=tuple(
            VersionSpan(version=WeightVersion(step=step), start=places[0], end=places[-1] + 1) for step, places in runs
        ),
        finish_reason=FinishReason.STOP,
        distribution=Distribution.EXACT,
    )
    return replace(made, **changes)


def turn(id: str, *completions: Completion, **changes: Any) -> Turn:
    made = Turn(
        id=id,
        parent=None,
        fork_at=0,
        new_prompt_ids=(1, 2),
        completions=completions,
        request_delta=(),
        sampling=SamplingParams(),
        started_s=1.0,
        ended_s=2.0,
    )
    return replace(made, **changes)


def trajectory(session_id: str, versions: Sequence[int], reward: float, **changes: Any) -> Trajectory:
    made = Trajectory(
        session_id=session_id,
        group_id="g",
        task_id="0",
        turns=(turn(f"{session_id}-t", completion(f"{session_id}-c", versions)),),
        rewards=Rewards(final=reward),
        status=Status.COMPLETED,
        error=None,
        logged={},
        started_s=1.0,
        ended_s=3.0,
    )
    return replace(made, **changes)


def record(session_id: str, versions: Sequence[int]) -> TokenRecord:
    """Return a record of one prompt token and the sampled tokens."""
    size = len(versions) + 1
    return TokenRecord(
        session_id=session_id,
        group_id="g",
        branch=0,
        parent_branch=None,
        token_ids=np.zeros(size, np.int32),
        loss_mask=np.array([False] + [True] * len(versions)),
        turn_index=np.zeros(size, np.int32),
        behavior_logprobs=np.zeros(size, np.float32),
        temperatures=np.ones(size, np.float32),
        versions=np.array([-1, *versions], np.int32),
        turn_rewards=np.zeros(1, np.float32),
    )


@asynccontextmanager
async def open_ledger(folder: Path) -> AsyncGenerator[Ledger]:
    """Open a ledger in the folder, in the incarnation that begins at step 0."""
    ledger = await Ledger.open(folder / "ledger.sqlite", create=True)
    await ledger.begin_incarnation(0)
    try:
        yield ledger
    finally:
        await ledger.aclose()


def session(id: str, **changes: Any) -> SessionRecord:
    made = SessionRecord(
        id=id, group_id="g", task_id="0", purpose=SessionPurpose.TRAIN, seed=0, key_hash="0" * 64, started_s=1.0
    )
    return replace(made, **changes)


async def begin_rollout(ledger: Ledger, session_id: str, group_id: str, task_id: str = "0") -> None:
    await ledger.own.open_session(session(session_id, group_id=group_id, task_id=task_id))


async def end_rollout(ledger: Ledger, rollout: Trajectory) -> Trajectory:
    """Add the turns of an open session to the ledger and close it; return it as the ledger has it."""
    for one in rollout.turns:
        await ledger.own.append_turn(rollout.session_id, one)
    await ledger.own.close_session(rollout)
    return await ledger.trajectory(rollout.session_id)
