"""Which groups have no spread: 1. rewards alike, within rounding, named parts by their weights included; 2. rewards by
completion tell turns apart; 3. one rollout alone has none; 4. flat groups in a row are counted until one is not."""

import pytest

from areal_agent import Rewards, Status, Trajectory
from areal_agent.rollout.dynamic_sampling import DynamicSampling


def group(*rewards: Rewards) -> list[Trajectory]:
    return [
        Trajectory(
            session_id=f"g-{index}",
            group_id="g",
            task_id="7",
            turns=(),
            rewards=reward,
            status=Status.COMPLETED,
            error=None,
            logged={},
            started_s=0.0,
            ended_s=1.0,
        )
        for index, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "is_flat"),
    [
        ([Rewards(final=1.0), Rewards(final=1.0)], True),
        ([Rewards(final=0.1 + 0.2), Rewards(final=0.3)], True),
        ([Rewards(final=1e8), Rewards(final=1e8 + 1)], True),
        ([Rewards(final=0.0), Rewards(final=1e-3)], False),
        ([Rewards(final=-1.0), Rewards(final=1.0)], False),
        ([Rewards(final=1.0, parts={"short": 1.0}), Rewards(final=1.0, parts={"short": 0.0})], False),
        ([Rewards(final=1.0, parts={"other": 1.0}), Rewards(final=1.0)], True),
        ([Rewards(final=0.5, parts={"short": 1.0}), Rewards(final=1.0)], True),
        ([Rewards(by_completion={"a": 1.0, "b": 0.0}), Rewards(by_completion={"c": 0.0, "d": 1.0})], False),
        ([Rewards(by_completion={"a": 1.0, "b": 0.0}), Rewards(by_completion={"c": 1.0, "d": 0.0})], True),
        ([Rewards(final=1.0)], True),
    ],
    ids=range(11),
)
def test_groups_without_spread_are_flat(rewards: list[Rewards], is_flat: bool) -> None:
    sampling = DynamicSampling(max_flat_groups=10, part_weights={"short": 0.5})
    assert sampling.replaces(group(*rewards)) is is_flat
    assert sampling.num_flat == int(is_flat)


def test_flat_groups_in_a_row_are_too_many_in_the_end() -> None:
    sampling = DynamicSampling(max_flat_groups=2)
    flat, spread = group(Rewards(final=1.0), Rewards(final=1.0)), group(Rewards(final=1.0), Rewards(final=0.0))
    seen = []
    for one in (flat, spread, flat, flat):
        sampling.replaces(one)
        seen.append(sampling.is_exhausted)
    assert (seen, sampling.num_flat) == ([False, False, False, True], 3)
    assert "2 groups in a row had no spread in reward, the last was task '7': 2 rollouts, each with reward 1" in (
        sampling.describe()
    )
