"""What a batch says of itself: 1. staleness is that of tokens in the loss, by age; 2. spans and interrupted completions
are counted; 3. pass@k is the chance that one of k samples succeeds; 4. groups without spread; 5. rewards by source;
6. rollouts that were cut or forked; 7. latencies; 8. tokens that were sampled and are not trained; 9. numbers that a
workflow logged; 10. named parts of the reward; 11. a batch of nothing says so.
"""

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import RolloutBatch, Trajectory
from areal_agent.observe.metrics import describe_batch, pass_at
from areal_agent.types import FinishReason, Rewards
from tests.histories import batch_of, record, trajectory


@pytest.fixture
def batch() -> RolloutBatch:
    return batch_of([trajectory("a", [3, 4], 1.0), trajectory("b", [4], 0.0)], [record("a", [3, 4]), record("b", [4])])


def described(*trajectories: Trajectory, **more: Any) -> dict[str, Any]:
    """Describe a batch in which each trajectory trains one token."""
    records = [record(one.session_id, [1]) for one in trajectories]
    return describe_batch(batch_of(trajectories, records), 1.0, **more)


def test_staleness_is_that_of_tokens_in_the_loss(batch: RolloutBatch) -> None:
    row = describe_batch(batch, success_reward=1.0)
    assert (row["staleness/max"], row["staleness/mean"]) == (1, pytest.approx(1 / 3))
    assert (row["staleness/share/0"], row["staleness/share/1"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert row["tokens/trained"] == 3


def test_spans_and_interrupted_completions_are_counted(batch: RolloutBatch) -> None:
    row = describe_batch(batch, success_reward=1.0)
    assert (row["rollouts/spanning"], row["rollouts/interrupted_completions"], row["rollouts/versions"]) == (1, 1, 1.5)
    assert (row["reward/mean"], row["reward/success"]) == (0.5, 0.5)


@given(successes=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_chance_that_one_of_k_succeeds(successes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(successes)))
    chosen = list(combinations(successes, k))
    assert pass_at(k, len(successes), sum(successes)) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def test_pass_at_k_is_over_the_groups_that_have_k() -> None:
    four = [replace(trajectory(f"a{n}", [1], float(n == 0)), group_id="a") for n in range(4)]
    two = [replace(trajectory(f"b{n}", [1], 1.0), group_id="b") for n in range(2)]
    row = described(*four, *two)
    assert row["reward/pass_at_2"] == pytest.approx((0.5 + 1.0) / 2)
    assert row["reward/pass_at_4"] == 1.0  # the group of two says nothing of four
    assert "reward/pass_at_8" not in row


def test_groups_without_spread() -> None:
    rewards = {"a": (1.0, 1.0), "b": (0.0, 1.0)}
    both = [
        replace(trajectory(f"{group}{n}", [1], reward), group_id=group)
        for group, of_group in rewards.items()
        for n, reward in enumerate(of_group)
    ]
    assert described(*both)["reward/zero_std_groups"] == 0.5


def test_rewards_by_source() -> None:
    rewards = {"maths": (1.0, 3.0), "code": (5.0, 5.0)}
    both = [
        replace(trajectory(f"{source}{n}", [1], reward), group_id=source, task_id=f"{source}-task")
        for source, of_source in rewards.items()
        for n, reward in enumerate(of_source)
    ]
    sources = {"maths-task": "maths", "code-task": "code"}
    row = described(*both, sources=sources)
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


def test_named_parts_of_the_reward() -> None:
    first = replace(trajectory("a", [1], 0.0), rewards=Rewards(final=0.0, parts={"format": 1.0, "style": 0.25}))
    second = replace(trajectory("b", [1], 0.0), rewards=Rewards(final=0.0, parts={"format": 0.0}))
    row = described(first, second)
    parts = {name: value for name, value in row.items() if name.startswith("reward/part/")}
    assert parts == {"reward/part/format": 0.5, "reward/part/style": 0.25}


def test_numbers_that_a_workflow_logged() -> None:
    first = replace(trajectory("a", [1], 0.0), logged={"tool_failures": 2, "is_hard": True, "answer": "42"})
    second = replace(trajectory("b", [1], 0.0), logged={"is_hard": False})
    row = described(first, second)
    logged = {name: value for name, value in row.items() if name.startswith("logged/")}
    assert logged == {"logged/tool_failures": 2.0, "logged/is_hard": 0.5}


def test_a_batch_of_nothing() -> None:
    row = describe_batch(batch_of([], []), 1.0)
    assert (row["rollouts/trained"], row["tokens/trained"], row["staleness/max"], row["reward/mean"]) == (0, 0, 0, 0.0)
