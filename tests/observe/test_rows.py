"""Rows and what they add up to: 1. staleness is that of tokens in the loss; 2. spans and interrupted completions are
counted; 3. after a crash the last row of a step counts, and later steps of the dead lineage do not; 4. idle shares;
5. what was sampled before the rows began, and trained in them, was generated; what an earlier process's rows tell of
counts once.
"""

import numpy as np
import pytest

from areal_agent import Completion, Rewards, RolloutBatch, Status, TokenRecord, Trajectory, TrajectoryGroup, Turn
from areal_agent.observe.rows import Uncounted, describe_batch, living_rows, total
from areal_agent.types import Distribution, FinishReason, SamplingParams, VersionSpan, WeightVersion


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


@pytest.fixture
def batch() -> RolloutBatch:
    spanning, fresh = trajectory("a", [3, 4], 1.0), trajectory("b", [4], 0.0)
    group = TrajectoryGroup(group_id="g", task_id="0", trajectories=(spanning, fresh))
    return RolloutBatch(step=5, groups=(group,), records=(record("a", [3, 4]), record("b", [4])))


def test_staleness_is_that_of_tokens_in_the_loss(batch: RolloutBatch) -> None:
    row = describe_batch(batch, success_reward=1.0)
    assert (row["staleness/max"], row["staleness/mean"]) == (1, pytest.approx(1 / 3))
    assert row["tokens/trained"] == 3


def test_spans_and_interrupted_completions_are_counted(batch: RolloutBatch) -> None:
    row = describe_batch(batch, success_reward=1.0)
    assert (row["rollouts/spanning"], row["rollouts/interrupted_completions"]) == (1, 1)
    assert (row["reward/mean"], row["reward/success"], row["rollouts/seconds"]) == (0.5, 0.5, 2.0)


def test_the_living_lineage_counts() -> None:
    rows = [{"step": step, "incarnation": 0} for step in (1, 2, 3)] + [{"step": 2, "incarnation": 1}]
    assert [(row["step"], row["incarnation"]) for row in living_rows(rows)] == [(1, 0), (2, 1)]


def test_totals() -> None:
    row = {
        "step": 1,
        "staleness/max": 2,
        "tokens/trained": 10,
        "tokens/generated": 12,
        "rollouts/trained": 4,
        "rollouts/spanning": 1,
        "rollouts/interrupted_completions": 3,
        "seconds/wall": 10.0,
        "seconds/engine/generating": 8.0,
        "seconds/trainer/waiting_for_rollouts": 4.0,
    }
    totals = total([row, row | {"step": 2, "staleness/max": 1}])
    assert (totals.steps, totals.trained_tokens, totals.generated_tokens) == (2, 20, 24)
    assert (totals.spanning_fraction, totals.interrupted_completions, totals.max_staleness_seen) == (0.25, 6, 2)
    assert totals.idle_fraction == {"engine": pytest.approx(0.2), "trainer": pytest.approx(0.4)}


@pytest.mark.parametrize(("row_ended_s", "num_tokens"), [(None, 3), (1.5, 3), (2.5, 0)])
def test_tokens_from_before_the_rows(batch: RolloutBatch, row_ended_s: float | None, num_tokens: int) -> None:
    rows = [] if row_ended_s is None else [{"step": 4, "time": row_ended_s}, {"step": 5, "time": 9.0}]  # 5 is dead
    assert Uncounted.between(rows, 4, until_s=2.0).num_tokens(batch) == num_tokens
    assert Uncounted.between(rows, 4, until_s=1.0).num_tokens(batch) == 0  # its turns ended at 2.0, in the rows


def test_generated_is_what_the_rows_saw_and_what_they_trained_from_before() -> None:
    row = {"step": 1, "staleness/max": 0, "tokens/trained": 10, "tokens/generated": 4, "tokens/generated_before": 6}
    assert total([row]).generated_tokens == 10


def test_no_rows_add_up_to_nothing() -> None:
    assert total([]).steps == 0
