"""Rows and what they add up to: 1. after a crash the last row of a step counts, and later steps of the dead lineage do
not; 2. rows of other kinds are no steps; 3. idle shares; 4. what was sampled before the rows began, and trained in
them, was generated; what an earlier process's rows tell of counts once; 5. time adds up over rows of every kind.
"""

import pytest

from areal_agent import RolloutBatch
from areal_agent.observe.metrics import Spent, Uncounted, evaluation_rows, living_rows, step_rows, total
from tests.observe.batches import batch_of, record, trajectory


@pytest.fixture
def batch() -> RolloutBatch:
    return batch_of([trajectory("a", [3, 4], 1.0), trajectory("b", [4], 0.0)], [record("a", [3, 4]), record("b", [4])])


def test_the_living_lineage_counts() -> None:
    rows = [{"step": step, "incarnation": 0} for step in (1, 2, 3)] + [{"step": 2, "incarnation": 1}]
    assert [(row["step"], row["incarnation"]) for row in living_rows(rows)] == [(1, 0), (2, 1)]


def test_totals() -> None:
    row = {
        "kind": "step",
        "step": 1,
        "staleness/max": 2,
        "tokens/trained": 10,
        "tokens/generated": 12,
        "rollouts/trained": 4,
        "rollouts/spanning": 1,
        "rollouts/interrupted_completions": 3,
        "trainer/num_skipped_updates": 1,
        "seconds/wall": 10.0,
        "seconds/engine/generating": 8.0,
        "seconds/trainer/waiting_for_rollouts": 4.0,
    }
    totals = total([row, row | {"step": 2, "staleness/max": 1}])
    assert (totals.steps, totals.trained_tokens, totals.generated_tokens) == (2, 20, 24)
    assert (totals.spanning_fraction, totals.interrupted_completions, totals.max_staleness_seen) == (0.25, 6, 2)
    assert totals.num_skipped_updates == 2
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


def test_rows_of_other_kinds_are_no_steps() -> None:
    rows = [{"kind": "time", "step": 0}, {"kind": "step", "step": 1}, {"kind": "evaluation", "step": 1}]
    assert [row["kind"] for row in step_rows(rows)] == [row["kind"] for row in living_rows(rows)] == ["step"]
    assert [row["kind"] for row in evaluation_rows(rows)] == ["evaluation"]


def test_time_adds_up_over_rows_of_every_kind() -> None:
    rows = [
        {"kind": "time", "seconds/wall": 3.0, "seconds/engine/starting": 3.0, "seconds/trainer/starting": 3.0},
        {"kind": "evaluation", "eval/seconds": 2.0},
        {"kind": "step", "seconds/wall": 5.0, "seconds/engine/generating": 5.0, "seconds/trainer/training": 5.0},
    ]
    spent = Spent.of(rows)
    assert spent.wall_s == 8.0
    assert spent.engine == {"starting": 3.0, "generating": 5.0}
    assert spent.trainer == {"starting": 3.0, "training": 5.0}
