"""What the rows of a run are remarked by: 1. a weight for a part of the reward that no rollout named is told once;
2. so are updates that were left out, at each step.
"""

import io
from dataclasses import replace

import pytest

from areal_agent.observe.progress import Progress
from areal_agent.run.results import RunMetrics
from areal_agent.trainer.wire import StepReport
from areal_agent.types import Rewards, RolloutBatch
from tests.observe.batches import batch_of, record, trajectory


@pytest.fixture
def batch() -> RolloutBatch:
    one = replace(trajectory("a", [1], 0.0), rewards=Rewards(final=0.0, parts={"format": 1.0}))
    return batch_of([one], [record("a", [1])])


def told(batch: RolloutBatch, *, part_names: tuple[str, ...] = (), num_skipped: int = 0) -> str:
    """All that is told of two steps."""
    stream = io.StringIO()
    metrics = RunMetrics(Progress(total_steps=2, mode="plain", stream=stream), 1.0, part_names=part_names)
    for step in (1, 2):
        metrics.trained(batch, StepReport(step=step, metrics={"num_skipped_updates": num_skipped}, seconds=1.0))
    return stream.getvalue()


def test_a_part_that_no_rollout_named_is_told_once(batch: RolloutBatch) -> None:
    text = told(batch, part_names=("fromat", "format"))
    assert text.count("algorithm.reward_parts has fromat, which no rollout") == 1
    assert "they named format" in text


def test_parts_that_were_named_are_not_told(batch: RolloutBatch) -> None:
    assert told(batch, part_names=("format",)) == ""


def test_updates_that_were_left_out_are_told(batch: RolloutBatch) -> None:
    text = told(batch, num_skipped=3)
    assert "step 1: skipped 3 updates" in text
    assert "step 2: skipped 3 updates" in text
