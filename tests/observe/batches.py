"""Small batches for the tests of what is observed of them: trajectories of one turn, and their records."""

from collections.abc import Sequence

import numpy as np

from areal_agent import Completion, Rewards, RolloutBatch, Status, TokenRecord, Trajectory, TrajectoryGroup, Turn
from areal_agent.types import Distribution, FinishReason, SamplingParams, VersionSpan, WeightVersion


def batch_of(trajectories: Sequence[Trajectory], records: Sequence[TokenRecord], step: int = 5) -> RolloutBatch:
    """One group a group id."""
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


def trajectory(session_id: str, versions: list[int], reward: float) -> Trajectory:
    spans = tuple(
        VersionSpan(version=WeightVersion(step=version), start=place, end=place + 1)
        for place, version in enumerate(versions)
    )
    completion = Completion(
        id=f"{session_id}-c",
        token_ids=tuple(range(len(versions))),
        logprobs=(-0.5,) * len(versions),
        versions=spans,
        finish_reason=FinishReason.STOP,
        distribution=Distribution.EXACT,
    )
    turn = Turn(
        id=f"{session_id}-t",
        parent=None,
        fork_at=0,
        new_prompt_ids=(1,),
        completions=(completion,),
        request_delta=(),
        sampling=SamplingParams(),
        started_s=1.0,
        ended_s=2.0,
    )
    return Trajectory(
        session_id=session_id,
        group_id="g",
        task_id="0",
        turns=(turn,),
        rewards=Rewards(final=reward),
        status=Status.COMPLETED,
        error=None,
        logged={},
        started_s=1.0,
        ended_s=3.0,
    )


def record(session_id: str, versions: list[int]) -> TokenRecord:
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
