"""Advantages, against numbers worked out by hand.

- Baselines are the group's mean (grpo) or the mean of the others (rloo), found by group id in any order.
- grpo divides by the group's standard deviation; `normalize_by_std` overrides either preset.
- A failed sibling is absent; a group of one has advantage 0; a forked rollout counts once.
- The reward reaches the first turn, also past a trailing observation; discounts count turns.
- Observations change nothing, whatever they say and however long they are.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.advantages import group_mean, group_std, leave_one_out, returns_to_go, token_advantages
from areal_agent.algorithms.config import AlgorithmConfig

GRPO = AlgorithmConfig(preset="grpo")
GRPO_PLAIN = AlgorithmConfig(preset="grpo", normalize_by_std=False)
RLOO = AlgorithmConfig(preset="rloo")

ONE_TURN = [[(False, [1, 2]), (True, [3, 4])]]


def rewards_and_groups() -> tuple[torch.Tensor, torch.Tensor]:
    """Group 7: rewards 1, 0, 2; group 3: rewards 4, 6; interleaved."""
    return torch.tensor([1.0, 4.0, 0.0, 6.0, 2.0], dtype=torch.float64), torch.tensor([7, 3, 7, 3, 7])


def test_group_mean_is_by_id_not_by_stride():
    assert group_mean(*rewards_and_groups()).tolist() == [1.0, 5.0, 1.0, 5.0, 1.0]


def test_leave_one_out_is_the_mean_of_the_others():
    assert leave_one_out(*rewards_and_groups()).tolist() == [1.0, 6.0, 1.5, 4.0, 0.5]


def test_leave_one_out_of_a_single_rollout_is_its_own_reward():
    assert leave_one_out(torch.tensor([3.0]), torch.tensor([0])).tolist() == [3.0]


def test_group_std_is_the_sample_standard_deviation():
    assert group_std(*rewards_and_groups()).tolist() == pytest.approx([1.0, 2**0.5, 1.0, 2**0.5, 1.0])


@pytest.mark.parametrize(
    ("config", "winner", "loser"),
    [
        (GRPO, 0.75 / 0.5001, -0.25 / 0.5001),
        (GRPO_PLAIN, 0.75, -0.25),
        (RLOO, 1.0, -1 / 3),
        (AlgorithmConfig(preset="rloo", normalize_by_std=True), 1.0 / 0.5001, -1 / 3 / 0.5001),
    ],
)
def test_one_winner_of_four(make_record, config, winner, loser):
    records = [make_record(f"s{i}", "g", ONE_TURN, [float(i == 0)]) for i in range(4)]
    advantages = token_advantages(records, {"s0": 1.0, "s1": 0.0, "s2": 0.0, "s3": 0.0}, config)
    assert advantages[0].tolist() == pytest.approx([0, 0, winner, winner])
    assert advantages[3].tolist() == pytest.approx([0, 0, loser, loser])


def test_a_failed_sibling_leaves_seven_with_their_own_baseline(make_record):
    rewards = {f"s{i}": float(i < 2) for i in range(8) if i != 5}
    records = [make_record(name, "g", ONE_TURN, [reward]) for name, reward in rewards.items()]
    advantages = token_advantages(records, rewards, GRPO_PLAIN)
    assert advantages[0][2].item() == pytest.approx(1 - 2 / 7)
    assert advantages[6][2].item() == pytest.approx(-2 / 7)


@pytest.mark.parametrize("config", [GRPO, GRPO_PLAIN, RLOO])
def test_a_group_of_one_has_advantage_zero(make_record, config):
    turns = [[(False, [1]), (True, [2])], [(False, [3]), (True, [4])]]
    (advantages,) = token_advantages([make_record("s", "g", turns, [0.5, 1.0])], {"s": 1.5}, config)
    assert advantages.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("config", [GRPO, RLOO])
def test_equal_rewards_have_advantage_zero(make_record, config):
    records = [make_record(f"s{i}", "g", ONE_TURN, [0.1]) for i in range(3)]
    advantages = token_advantages(records, dict.fromkeys(["s0", "s1", "s2"], 0.1), config)
    assert all(one.abs().max().item() < 1e-9 for one in advantages)


def test_a_rollout_forked_into_branches_counts_once(make_record):
    branches = [make_record("s0", "g", ONE_TURN, [1.0], branch=i) for i in range(5)]
    other = make_record("s1", "g", ONE_TURN, [0.0])
    advantages = token_advantages([*branches, other], {"s0": 1.0, "s1": 0.0}, GRPO_PLAIN)
    assert advantages[4][2].item() == 0.5
    assert advantages[5][2].item() == -0.5


def test_the_final_reward_reaches_the_first_turn_past_a_trailing_observation(make_record):
    turns = [[(False, [1]), (True, [2])], [(False, [3, 3, 3]), (True, [4]), (False, [5, 5])]]
    records = [make_record("s0", "g", turns, [0.0, 1.0]), make_record("s1", "g", turns, [0.0, 0.0])]
    advantages = token_advantages(records, {"s0": 1.0, "s1": 0.0}, GRPO_PLAIN)
    assert advantages[0].tolist() == [0, 0.5, 0, 0, 0, 0.5, 0, 0]
    assert advantages[1].tolist() == [0, -0.5, 0, 0, 0, -0.5, 0, 0]


def test_returns_to_go_discount_by_turn():
    assert returns_to_go(torch.tensor([1.0, 0.0, 4.0]), 0.5).tolist() == [2.0, 2.0, 4.0]


def test_a_reward_of_an_early_turn_is_not_earned_by_later_turns(make_record):
    turns = [[(False, [1]), (True, [2])], [(False, [3]), (True, [4])]]
    records = [make_record("s0", "g", turns, [0.5, 1.0]), make_record("s1", "g", turns, [0.0, 0.0])]
    advantages = token_advantages(records, {"s0": 1.5, "s1": 0.0}, GRPO_PLAIN)
    assert advantages[0].tolist() == [0, 0.75, 0, 0.25]


observation = st.lists(st.integers(0, 300), min_size=1, max_size=40)


@given(first=observation, second=observation, discount=st.sampled_from([1.0, 0.9]))
def test_observations_do_not_change_the_advantages_of_actions(make_record, first, second, discount):
    def action_advantages(observed: list[int]) -> list[float]:
        turns = [[(False, [1]), (True, [2, 3])], [(False, observed), (True, [4])], [(False, observed), (True, [5])]]
        records = [make_record("s0", "g", turns, [0.0, 0.2, 1.0]), make_record("s1", "g", turns, [0.0, 0.0, 0.0])]
        config = AlgorithmConfig(discount=discount)
        advantages = token_advantages(records, {"s0": 1.2, "s1": 0.0}, config)
        return advantages[0].numpy()[np.asarray(records[0].loss_mask)].tolist()

    assert action_advantages(first) == action_advantages(second)


def test_no_records_have_no_advantages():
    assert token_advantages([], {}, GRPO) == []
