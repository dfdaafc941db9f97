"""Which groups have no spread.

1. rewards alike, within rounding, named parts by their weights included; 2. totals that are alike and were earned in
other turns are told apart, and so are, with a discount, rollouts of other lengths; 3. so are parallel samples of one
call; 4. what has no token to train does not count, and one rollout alone has no spread; 5. where turns are compared by
their states, turns of one rollout are told apart; 6. a flat group is one whose advantages are zero, whatever its
rewards; 7. flat groups in a row are counted until one is not.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_agent import Rewards, Trajectory
from areal_agent.algorithms.advantages import token_advantages
from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import with_causal_credit
from areal_agent.rollout.producer import DynamicSampling
from areal_agent.tokens.records import token_records
from areal_agent.types import Distribution
from tests.histories import completion, trajectory, turn


def rollout(
    rewards: Rewards, *, num_turns: int = 1, num_samples: int = 1, distribution: Distribution = Distribution.EXACT
) -> Trajectory:
    """Its answers are `0a`, `1a`, ...; the last turn may have parallel samples, `0b`."""
    last = num_turns - 1
    names = [["0a", "0b"][:num_samples] if number == last == 0 else [f"{number}a"] for number in range(num_turns)]
    turns = [
        turn(
            f"t{number}",
            *(completion(name, [0, 0], distribution=distribution) for name in of_turn),
            parent=f"{number - 1}a" if number else None,  # it goes on with the first answer of the turn before it
            fork_at=4 * number,
            started_s=float(number),
            ended_s=number + 0.5,
        )
        for number, of_turn in enumerate(names)
    ]
    return trajectory("s", [], 0.0, task_id="7", turns=tuple(turns), rewards=rewards)


def group(*rollouts: Trajectory) -> list[Trajectory]:
    return [replace(one, session_id=f"g-{index}") for index, one in enumerate(rollouts)]


def is_flat(rollouts: Sequence[Trajectory], **settings: object) -> bool:
    return DynamicSampling(max_flat_groups=10, **settings).replaces(group(*rollouts))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([Rewards(final=1.0), Rewards(final=1.0)], True),
        ([Rewards(final=0.1 + 0.2), Rewards(final=0.3)], True),
        ([Rewards(final=1e8), Rewards(final=1e8 + 1)], True),
        ([Rewards(final=0.0), Rewards(final=1e-3)], False),
        ([Rewards(final=-1.0), Rewards(final=1.0)], False),
        ([Rewards(final=1.0, parts={"short": 1.0}), Rewards(final=1.0, parts={"short": 0.0})], False),
        ([Rewards(final=1.0, parts={"other": 1.0}), Rewards(final=1.0)], True),
        ([Rewards(final=0.5, parts={"short": 1.0}), Rewards(final=1.0)], True),
        ([Rewards(final=1.0), Rewards(by_completion={"0a": 1.0})], True),
        ([Rewards(final=1.0)], True),
    ],
    ids=range(10),
)
def test_groups_without_spread_are_flat(rewards: list[Rewards], expected: bool) -> None:
    sampling = DynamicSampling(max_flat_groups=10, part_weights={"short": 0.5})
    assert sampling.replaces(group(*map(rollout, rewards))) is expected
    assert sampling.num_flat == int(expected)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"0a": 1.0}, {"1a": 1.0}, False),
        ({"0a": 1.0, "1a": 0.0}, {"0a": 0.0, "1a": 1.0}, False),
        ({"0a": 1.0, "1a": 0.5}, {"1a": 0.5, "0a": 1.0}, True),
    ],
    ids=["other turns", "the same values, swapped", "the same turns, told in another order"],
)
def test_alike_in_total_they_are_told_apart_by_turns(first: dict, second: dict, expected: bool) -> None:
    rollouts = [rollout(Rewards(by_completion=one), num_turns=2) for one in (first, second)]
    assert is_flat(rollouts) is expected


@pytest.mark.parametrize(("discount", "expected"), [(1.0, True), (0.5, False)])
def test_with_a_discount_the_sooner_is_told_apart(discount: float, expected: bool) -> None:
    rollouts = [rollout(Rewards(final=1.0), num_turns=num_turns) for num_turns in (1, 2)]
    assert is_flat(rollouts, discount=discount) is expected


@pytest.mark.parametrize(("of_one", "expected"), [(0.5, True), (1.0, False)])
def test_parallel_samples_are_told_apart(of_one: float, expected: bool) -> None:
    """All rollouts earn the same on the mean of their samples."""
    rewards = Rewards(by_completion={"0a": of_one, "0b": 1.0 - of_one})
    assert is_flat([rollout(rewards, num_samples=2)] * 2) is expected


@pytest.mark.parametrize(("trains_altered", "expected"), [(False, True), (True, False)])
def test_what_has_no_token_to_train_does_not_count(trains_altered: bool, expected: bool) -> None:
    failed = rollout(Rewards(final=0.0), distribution=Distribution.ALTERED)
    rollouts = [failed, rollout(Rewards(final=1.0)), rollout(Rewards(final=1.0))]
    assert is_flat(rollouts, trains_altered=trains_altered) is expected


@pytest.mark.parametrize(("compares_turns", "expected"), [(False, True), (True, False)])
def test_turns_that_meet_in_a_state_are_told_apart(compares_turns: bool, expected: bool) -> None:
    rollouts = [rollout(Rewards(by_completion={"0a": 1.0}), num_turns=2)] * 2
    assert is_flat(rollouts, compares_turns=compares_turns) is expected


few = st.sampled_from([0.0, 0.5, 1.0])
rollouts_of_any_kind = st.builds(
    rollout,
    st.builds(
        Rewards,
        final=st.none() | few,
        by_completion=st.dictionaries(st.sampled_from(["0a", "0b", "1a", "2a"]), few, max_size=2),
    ),
    num_turns=st.integers(1, 3),
    num_samples=st.integers(1, 2),
    distribution=st.sampled_from(Distribution),
)


@given(
    rollouts=st.lists(rollouts_of_any_kind, min_size=1, max_size=3),
    discount=st.sampled_from([1.0, 0.5]),
    step_group_weight=st.sampled_from([0.0, 0.5]),
    advantage=st.sampled_from(["dr_grpo", "rloo"]),
)
def test_all_advantages_of_a_flat_group_are_zero(
    rollouts: list[Trajectory], discount: float, step_group_weight: float, advantage: str
) -> None:
    if not is_flat(rollouts, discount=discount, compares_turns=step_group_weight > 0):
        return
    config = AlgorithmConfig(advantage=advantage, discount=discount, step_group_weight=step_group_weight)
    records = [record for one in group(*rollouts) for record in token_records(one) if record.loss_mask.any()]
    for of_record in token_advantages(with_causal_credit(records, discount), config):
        assert of_record.abs().max() < 1e-5


def test_flat_groups_in_a_row_are_too_many_in_the_end() -> None:
    sampling = DynamicSampling(max_flat_groups=2)
    right, wrong = rollout(Rewards(final=1.0)), rollout(Rewards(final=0.0))
    seen = []
    for one in (group(right, right), group(right, wrong), group(right, right), group(right, right)):
        sampling.replaces(one)
        seen.append(sampling.is_exhausted)
    assert (seen, sampling.num_flat) == ([False, False, False, True], 3)
    assert "2 groups in a row had no spread in reward, the last was task '7': 2 rollouts, each with reward 1" in (
        sampling.describe()
    )


def test_a_group_with_nothing_to_train_says_so() -> None:
    sampling = DynamicSampling(max_flat_groups=1)
    altered = rollout(Rewards(final=1.0), distribution=Distribution.ALTERED)
    assert sampling.replaces(group(altered, rollout(Rewards(final=0.0))))
    assert "task '7': 1 of 2 rollouts had a token to train" in sampling.describe()
