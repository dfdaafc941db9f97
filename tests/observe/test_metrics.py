"""metrics.jsonl, and what its rows add up to.

- Rows come back in order and are in the file at once; non-finite numbers are null; numpy's numbers are numbers.
- Readers skip a torn last line, and reopening removes it; a broken line before the last is an error that names it.
- A row that a full disk takes only in part is an error, and leaves the rows before it.
- After a crash the last row of a step counts, and later steps of the dead lineage do not; other rows are no steps.
- Tokens sampled before the rows began and trained in them count as generated, once.
- Idle shares, and time over rows of every kind.
"""

import resource
from pathlib import Path

import numpy as np
import pytest

from areal_agent import RolloutBatch
from areal_agent.errors import ArealAgentError
from areal_agent.observe.metrics import (
    MetricsLog,
    Spent,
    Uncounted,
    evaluation_rows,
    living_rows,
    read_metrics,
    step_rows,
    total,
)
from tests.histories import batch_of, record, trajectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_are_in_the_file_at_once_and_in_order(path: Path) -> None:
    log = MetricsLog(path)
    for step in range(3):
        log.append({"step": step, "reward/mean": step / 2})
        assert read_metrics(path)[-1] == {"step": step, "reward/mean": step / 2}
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_numpy_numbers_are_numbers_and_what_is_not_finite_is_null(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"nan": float("nan"), "inf": float("inf"), "numpy": np.float32("nan")})
    log.append({"float": np.float32(0.5), "int": np.int64(3), "bool": np.bool_(True)})
    log.close()
    assert path.read_text().splitlines()[0] == '{"nan":null,"inf":null,"numpy":null}'
    assert read_metrics(path)[1] == {"float": 0.5, "int": 3, "bool": True}


def test_readers_skip_a_torn_last_line(path: Path) -> None:
    path.write_text('{"step":1}\n{"step":2,"rew')
    assert read_metrics(path) == [{"step": 1}]


@pytest.mark.parametrize(("torn", "kept"), [('{"step":1}\n{"step":2,"rew', '{"step":1}\n'), ('{"ste', "")])
def test_reopening_removes_a_torn_last_line_and_keeps_the_rest(path: Path, torn: str, kept: str) -> None:
    path.write_text(torn)
    log = MetricsLog(path)
    assert path.read_text() == kept
    log.append({"step": 2})
    log.close()
    assert path.read_text() == kept + '{"step":2}\n'


def test_a_broken_line_before_the_last_is_an_error(path: Path) -> None:
    path.write_text('{"step":1}\n{"step":\n{"step":3}\n')
    with pytest.raises(ArealAgentError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_metrics(path)


def test_a_row_that_a_full_disk_takes_in_part_is_not_there(path: Path) -> None:
    log = MetricsLog(path)
    log.append({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(ArealAgentError, match=r"could not be written: .*; make room"):
            log.append({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.append({"step": 3})
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


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
    totals = total([row, row | {"step": 2, "staleness/max": 1, "tokens/generated_before": 6}])
    assert totals == {
        "steps": 2,
        "trained_tokens": 20,
        "generated_tokens": 30,  # what the rows saw, and what they trained from before
        "spanning_fraction": 0.25,
        "interrupted_completions": 6,
        "max_staleness_seen": 2,
        "idle_fraction": {"engine": 0.2, "trainer": 0.4},
        "loop_blocked_s": 0.0,
        "num_skipped_updates": 2,
    }
    assert total([])["steps"] == 0


@pytest.mark.parametrize(("row_ended_s", "num_tokens"), [(None, 3), (1.5, 3), (2.5, 0)])
def test_tokens_from_before_the_rows(batch: RolloutBatch, row_ended_s: float | None, num_tokens: int) -> None:
    rows = [] if row_ended_s is None else [{"step": 4, "time": row_ended_s}, {"step": 5, "time": 9.0}]  # 5 is dead
    assert Uncounted.between(rows, 4, until_s=2.0).num_tokens(batch) == num_tokens
    assert Uncounted.between(rows, 4, until_s=1.0).num_tokens(batch) == 0  # its turns ended at 2.0, in the rows


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
