"""metrics.jsonl, the metrics of a batch, and what rows add up to.

- Rows come back in order and are in the file at once; non-finite numbers are null; numpy's numbers are numbers.
- Readers skip a torn last line, and reopening removes it; a broken line before the last is an error that names it.
- A row that a full disk takes only in part is an error, and leaves the rows before it.
- After a crash the last row of a step counts, and later steps of the dead lineage do not; other rows are no steps.
- Tokens sampled before the rows began and trained in them count as generated, once.
- Idle shares, and time over rows of every kind.
- A batch: staleness of the tokens in the loss, by age; spans and interrupted completions; pass@k, the chance that one
  of k samples succeeds; groups without spread; rewards by source and by named part; rollouts that were cut or forked;
  latencies; tokens that were sampled and are not trained; numbers that a workflow logged; a batch of nothing.
"""

import random
import resource
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import RolloutBatch, Trajectory
from areal_agent.errors import ArealAgentError
from areal_agent.observe.metrics import (
    MetricsLog,
    Spent,
    Uncounted,
    describe_batch,
    evaluation_rows,
    living_rows,
    pass_at,
    read_metrics,
    step_rows,
    total,
)
from areal_agent.types import FinishReason, Rewards
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


@pytest.mark.parametrize(("torn", "kept"), [('{"step":1}\n{"step":2,"rew', '{"step":1}\n'), ('{"ste', "")])
def test_a_torn_last_line_is_skipped_and_removed_when_reopening(path: Path, torn: str, kept: str) -> None:
    path.write_text(torn)
    assert read_metrics(path) == ([{"step": 1}] if kept else [])
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
        with pytest.raises(ArealAgentError, match=r"could not be written: .*; mend that"):
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
        "altered_tokens": 0,
        "other_roots_tokens": 0,
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


def described(*trajectories: Trajectory, **more: Any) -> dict[str, Any]:
    """Describe a batch in which each trajectory trains one token."""
    records = [record(one.session_id, [1]) for one in trajectories]
    return describe_batch(batch_of(trajectories, records), 1.0, **more)


def test_staleness_of_tokens_in_the_loss_and_spans_over_versions(batch: RolloutBatch) -> None:
    row = describe_batch(batch, success_reward=1.0)
    assert (row["staleness/max"], row["staleness/mean"]) == (1, pytest.approx(1 / 3))
    assert (row["staleness/share/0"], row["staleness/share/1"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert row["tokens/trained"] == 3
    assert (row["rollouts/spanning"], row["rollouts/interrupted_completions"], row["rollouts/versions"]) == (1, 1, 1.5)
    assert (row["reward/mean"], row["reward/success"]) == (0.5, 0.5)


@given(successes=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_chance_that_one_of_k_succeeds(successes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(successes)))
    chosen = list(combinations(successes, k))
    assert pass_at(k, len(successes), sum(successes)) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_k_is_over_the_groups_that_have_k() -> None:
    row = described(*groups_of({"a": (1.0, 0.0, 0.0, 0.0), "b": (1.0, 1.0)}))
    assert row["reward/pass_at_2"] == pytest.approx((0.5 + 1.0) / 2)
    assert row["reward/pass_at_4"] == 1.0  # the group of two says nothing of four
    assert "reward/pass_at_8" not in row


def groups_of(rewards: dict[str, tuple[float, ...]]) -> list[Trajectory]:
    """Rollouts by group, whose names their tasks have, too."""
    return [
        replace(trajectory(f"{group}{number}", [1], reward), group_id=group, task_id=group)
        for group, of_group in rewards.items()
        for number, reward in enumerate(of_group)
    ]


def test_groups_without_spread() -> None:
    assert described(*groups_of({"a": (1.0, 1.0), "b": (0.0, 1.0)}))["reward/zero_std_groups"] == 0.5


def test_rewards_by_source() -> None:
    sources = {"add": "maths", "sort": "code"}
    row = described(*groups_of({"add": (1.0, 3.0), "sort": (5.0, 5.0)}), sources=sources)
    assert (row["reward/mean/maths"], row["reward/std/maths"]) == (2.0, 1.0)
    assert (row["reward/mean/code"], row["reward/std/code"]) == (5.0, 0.0)


def test_rollouts_that_were_cut_or_forked() -> None:
    cut, forked = trajectory("cut", [1], 0.0), trajectory("forked", [1], 0.0)
    turn = cut.turns[0]
    completion = replace(turn.completions[0], finish_reason=FinishReason.LENGTH)
    cut = replace(cut, turns=(replace(turn, completions=(completion,)),))
    branches = [record("forked", [1]), replace(record("forked", []), branch=1, parent_branch=0)]
    row = describe_batch(batch_of([cut, forked], [record("cut", [1]), *branches]), 1.0)
    assert (row["rollouts/truncated"], row["rollouts/forked"]) == (0.5, 0.5)


def test_latencies() -> None:
    seconds = list(range(1, 22))
    random.Random(0).shuffle(seconds)
    several = [replace(trajectory(f"s{n}", [1], 0.0), started_s=100.0, ended_s=100.0 + n) for n in seconds]
    row = described(*several)
    assert (row["rollouts/seconds"], row["rollouts/seconds_p50"], row["rollouts/seconds_p95"]) == (11.0, 11.0, 20.0)
    assert (row["turns/seconds_p50"], row["turns/seconds_p95"]) == (1.0, 1.0)


def test_tokens_that_were_sampled_and_are_not_trained() -> None:
    one = record("a", [1, 1, 1, 1])
    one.loss_mask[-1] = False
    assert describe_batch(batch_of([trajectory("a", [1] * 4, 0.0)], [one]), 1.0)["tokens/masked_fraction"] == 0.25


def test_named_parts_of_the_reward_and_numbers_that_a_workflow_logged() -> None:
    parts = {"format": 1.0, "style": 0.25}
    logged = {"tool_failures": 2, "is_hard": True, "answer": "42"}
    first = replace(trajectory("a", [1], 0.0), rewards=Rewards(final=0.0, parts=parts), logged=logged)
    rewards = Rewards(final=0.0, parts={"format": 0.0})
    second = replace(first, session_id="b", rewards=rewards, logged={"is_hard": False})
    row = described(first, second, parts=[first.rewards.parts, second.rewards.parts])
    assert {name: value for name, value in row.items() if name.startswith(("reward/part/", "logged/"))} == {
        "reward/part/format": 0.5,
        "reward/part/style": 0.25,
        "logged/tool_failures": 2.0,
        "logged/is_hard": 0.5,
    }


def test_a_batch_of_nothing() -> None:
    row = describe_batch(batch_of([], []), 1.0)
    assert (row["rollouts/trained"], row["tokens/trained"], row["staleness/max"], row["reward/mean"]) == (0, 0, 0, 0.0)
