"""Advantages, against numbers worked out by hand.

- Baselines are the group's mean (grpo) or the mean of the others (rloo), found by group id in any order.
- grpo divides by the group's standard deviation; `normalize_by_std` overrides either preset.
- `whiten` normalises over all tokens of the batch; after the group's mean, that is REINFORCE++ with a baseline.
- A group of one has advantage 0; a forked rollout counts once; trainer/test_step.py has a failed sibling.
- The reward reaches the first turn, also past a trailing observation; discounts count turns.
- Observations change nothing, whatever they say and however long they are.
- gae skips observations in time, ends at the last action, and at lambda 1 is the return minus the value; reinforce_pp
  normalises over the tokens of the batch; dr_grpo never divides.
- Groups are compared turn by turn: rollouts that are all alike have advantage 0 wherever they are paid, also
  discounted; one that has ended stands with its last turn, a branch from its own first turn on.
- Penalties are paid by their token and all before it. Step groups compare turns that saw the same observation.
- A user's own advantage is called, and what it returns is checked.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_agent.algorithms.advantages import (
    gae,
    group_mean,
    group_std,
    leave_one_out,
    own_advantages,
    returns_by_token,
    token_advantages,
    value_targets,
    whitened,
)
from areal_agent.algorithms.config import AlgorithmConfig, load_own

GRPO = AlgorithmConfig(preset="grpo")
GRPO_PLAIN = AlgorithmConfig(preset="grpo", normalize_by_std=False)
RLOO = AlgorithmConfig(preset="rloo")

ONE_TURN = [[(False, [1, 2]), (True, [3, 4])]]


def rewards_and_groups() -> tuple[torch.Tensor, torch.Tensor]:
    """Group 7: rewards 1, 0, 2; group 3: rewards 4, 6; interleaved."""
    return torch.tensor([1.0, 4.0, 0.0, 6.0, 2.0], dtype=torch.float64), torch.tensor([7, 3, 7, 3, 7])


def test_statistics_of_groups_are_by_id_not_by_stride():
    assert group_mean(*rewards_and_groups()).tolist() == [1.0, 5.0, 1.0, 5.0, 1.0]
    assert leave_one_out(*rewards_and_groups()).tolist() == [1.0, 6.0, 1.5, 4.0, 0.5]
    assert group_std(*rewards_and_groups()).tolist() == pytest.approx([1.0, 2**0.5, 1.0, 2**0.5, 1.0])  # of a sample


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
    advantages = token_advantages(records, config)
    assert advantages[0].tolist() == pytest.approx([0, 0, winner, winner])
    assert advantages[3].tolist() == pytest.approx([0, 0, loser, loser])


@pytest.mark.parametrize("config", [GRPO, GRPO_PLAIN, RLOO])
def test_a_group_of_one_has_advantage_zero(make_record, config):
    turns = [[(False, [1]), (True, [2])], [(False, [3]), (True, [4])]]
    (advantages,) = token_advantages([make_record("s", "g", turns, [0.5, 1.0])], config)
    assert advantages.tolist() == [0, 0, 0, 0]


def test_a_rollout_forked_into_branches_counts_once(make_record):
    branches = [make_record("s0", "g", ONE_TURN, [1.0], branch=i) for i in range(5)]
    other = make_record("s1", "g", ONE_TURN, [0.0])
    advantages = token_advantages([*branches, other], GRPO_PLAIN)
    assert advantages[4][2].item() == 0.5
    assert advantages[5][2].item() == -0.5


def test_returns_are_discounted_from_token_to_token():
    assert returns_by_token([1.0, 0.0, 4.0], [0.5, 0.5, 1.0]).tolist() == [2.0, 2.0, 4.0]


def test_gae_by_hand():
    # deltas: 1 + 0.5*2 - 4 = -2; 0 + 1*6 - 2 = 4; 8 - 6 = 2, and nothing is bootstrapped behind the last
    # A_2 = 2; A_1 = 4 + 1*0.5*2 = 5; A_0 = -2 + 0.5*0.5*5 = -0.75
    assert gae([1.0, 0.0, 8.0], [4.0, 2.0, 6.0], [0.5, 1.0, 1.0], 0.5).tolist() == [-0.75, 5.0, 2.0]


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.sampled_from([1.0, 0.9])), max_size=20))
def test_gae_at_lambda_one_is_the_return_minus_the_value(steps):
    rewards, values, discounts = ([step[i] for step in steps] for i in range(3))
    returns = returns_by_token(rewards, discounts) - torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(gae(rewards, values, discounts, 1.0), returns)


def test_whitened_values_by_hand():
    assert whitened(torch.tensor([1.0, 3.0, 5.0])).tolist() == pytest.approx([-2 / 1.63309, 0.0, 2 / 1.63309], rel=1e-4)
    assert whitened(torch.zeros(0)).tolist() == []
    assert whitened(torch.tensor([7.0])).tolist() == [0.0]


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch_and_needs_no_group(make_record):
    long = make_record("s0", "g0", [[(False, [1]), (True, [2, 3, 4])]], [1.0])
    short = make_record("s1", "g1", [[(False, [1]), (True, [2])]], [0.0])
    advantages = token_advantages([long, short], AlgorithmConfig(advantage="reinforce_pp"))
    std = 0.1875**0.5 + 1e-4  # of 1, 1, 1, 0
    assert advantages[0].tolist() == pytest.approx([0, 0.25 / std, 0.25 / std, 0.25 / std])
    assert advantages[1].tolist() == pytest.approx([0, -0.75 / std])
    raw = AlgorithmConfig(advantage="reinforce_pp", whiten=False)
    assert token_advantages([long, short], raw)[0].tolist() == [0, 1, 1, 1]


def test_whitening_after_the_mean_of_the_group_is_reinforce_pp_with_a_baseline(make_record):
    rewards = {"g0": (1.0, 0.0), "g1": (5.0, 4.0)}  # less the means of their groups: 0.5, -0.5, 0.5, -0.5
    records = [make_record(f"{g}{i}", g, ONE_TURN, [one]) for g, pair in rewards.items() for i, one in enumerate(pair)]
    advantages = token_advantages(records, AlgorithmConfig(advantage="dr_grpo", whiten=True))
    assert [one[-1].item() for one in advantages] == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001] * 2)


TWO_TURNS = [[(False, [1]), (True, [2, 3])], [(False, [9, 9, 9]), (True, [4]), (False, [5, 5])]]
PPO = AlgorithmConfig(preset="ppo", whiten=False, gae_lambda=0.5, discount=0.5)


def test_gae_skips_observations_in_time_and_ends_at_the_last_action(make_record):
    record = make_record("s", "g", TWO_TURNS, [1.0, 8.0])
    values = [torch.tensor([3.0, 4.0, 6.0])]
    # within the turn 1, to the next turn 0.5; rewards 0, 1, 8. deltas: 4 - 3 = 1; 1 + 0.5*6 - 4 = 0; 8 - 6 = 2
    # A: 2; 0 + 0.5*0.5*2 = 0.5; 1 + 1*0.5*0.5 = 1.25
    (advantages,) = token_advantages([record], PPO, values=values)
    assert advantages.tolist() == [0, 1.25, 0.5, 0, 0, 0, 2, 0, 0]
    (targets,) = value_targets([record], values, PPO)
    assert targets.tolist() == [4.25, 4.5, 8.0]


def test_a_penalty_is_paid_by_the_token_and_all_before_it(make_record):
    records = [make_record("s0", "g", TWO_TURNS, [0.0, 1.0]), make_record("s1", "g", TWO_TURNS, [0.0, 1.0])]
    penalties = [torch.tensor([0.0, 0.25, 0.5]), torch.zeros(3)]
    advantages = token_advantages(records, GRPO_PLAIN, penalties=penalties)
    # from turn 0 on 0.25 and 1, their mean 0.625; from turn 1 on 0.5 and 1, their mean 0.75
    assert advantages[0].tolist() == [0, -0.375, -0.375, 0, 0, 0, -0.25, 0, 0]
    assert advantages[1].tolist() == [0, 0.375, 0.375, 0, 0, 0, 0.25, 0, 0]


def test_step_groups_compare_turns_that_saw_the_same(make_record):
    def rollout(name: str, seen: int, reward: float):
        return make_record(name, "g", [[(False, [1]), (True, [2])], [(False, [seen]), (True, [3, 3])]], [0.0, reward])

    records = [rollout("s0", 7, 1.0), rollout("s1", 7, 0.0), rollout("s2", 8, 0.5)]
    config = AlgorithmConfig(advantage="dr_grpo", step_group_weight=0.5)
    advantages = token_advantages(records, config)
    # first turns: all three saw 1, mean 0.5; second turns: two saw 7, mean 0.5; one saw 8, alone
    assert advantages[0].tolist() == [0, 0.75, 0, 0.75, 0.75]
    assert advantages[1].tolist() == [0, -0.75, 0, -0.75, -0.75]
    assert advantages[2].tolist() == [0, 0, 0, 0, 0]
    late = token_advantages([records[0], records[2]], config)
    assert late[0].tolist() == [0, 0.375, 0, 0.25, 0.25]


def test_the_reward_of_a_turn_without_a_loss_token_goes_to_the_action_before_it(make_record):
    turns = [[(False, [1])], [(False, [1]), (True, [2])], [(False, [3])], [(False, [3])]]
    record = make_record("s0", "g0", turns, [5.0, 0.0, 0.0, 4.0])
    config = AlgorithmConfig(advantage="reinforce_pp", whiten=False, discount=0.5)
    assert token_advantages([record], config)[0].tolist() == [0, 0, 1.0, 0, 0]


def per_token(records, rewards, config):
    return [torch.full((len(record.token_ids),), rewards[record.session_id]) for record in records]


def test_a_users_advantage_is_called_and_checked(make_record):
    record = make_record("s0", "g", ONE_TURN, [2.0])
    config = AlgorithmConfig(advantage=f"{__name__}:per_token")
    function = load_own(config, "advantage")
    assert own_advantages(function, [record], {"s0": 2.0}, config)[0].tolist() == [2, 2, 2, 2]
    with pytest.raises(ValueError, match=r"returned tensors of shapes \[\(3,\)\] for records of \[4\] tokens"):
        own_advantages(lambda *_: [torch.zeros(3)], [record], {"s0": 2.0}, config)
    with pytest.raises(ValueError, match="returned list of list; return a list with one torch tensor for each record"):
        own_advantages(lambda *_: [[0.0] * 4], [record], {"s0": 2.0}, config)
    with pytest.raises(ValueError, match="returned NoneType of NoneType"):
        own_advantages(lambda *_: None, [record], {"s0": 2.0}, config)
    with pytest.raises(ValueError, match="NaN or infinity for a loss token of session 's0'"):
        own_advantages(lambda *_: [torch.tensor([0.0, 0.0, 1.0, torch.nan])], [record], {"s0": 2.0}, config)
    observed = own_advantages(lambda *_: [torch.tensor([torch.nan, 0.0, 1.0, 1.0])], [record], {"s0": 2.0}, config)
    assert observed[0][2:].tolist() == [1.0, 1.0]  # what is not in the loss may be anything
    assert load_own(GRPO, "advantage") is None


def test_a_reward_of_an_early_turn_is_not_earned_by_later_turns(make_record):
    turns = [[(False, [1]), (True, [2])], [(False, [3]), (True, [4])]]
    records = [make_record("s0", "g", turns, [0.5, 1.0]), make_record("s1", "g", turns, [0.0, 0.0])]
    advantages = token_advantages(records, GRPO_PLAIN)
    assert advantages[0].tolist() == [0, 0.75, 0, 0.5]  # against 1.5 and 0, then against 1 and 0
    assert token_advantages([], GRPO) == []


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.0, 0.0, 1.0], [0.5, 0.25, 0.25], [0.0, -0.125, 0.0], [0.1, 0.3, 0.7]])
@pytest.mark.parametrize("discount", [1.0, 0.5, 0.83])
def test_rollouts_that_are_all_alike_have_advantage_zero_at_every_turn(make_record, advantage, rewards, discount):
    turns = [[(False, [1]), (True, [2])]] * 3
    records = [make_record(f"s{i}", "g", turns, rewards) for i in range(7)]
    for one in token_advantages(records, AlgorithmConfig(advantage=advantage, discount=discount)):
        assert one.tolist() == [0.0] * 6


def test_a_discounted_reward_is_compared_turn_by_turn(make_record):
    long = make_record("s0", "g", [[(False, [1]), (True, [2])]] * 3, [0.0, 0.0, 1.0])
    short = make_record("s1", "g", ONE_TURN, [1.0])
    advantages = token_advantages([long, short], AlgorithmConfig(advantage="rloo", discount=0.5))
    # the long one from its turns on: 0.25, 0.5, 1; the short one, held at its last turn: 1, 1, 1
    assert advantages[0].tolist() == [0, -0.75, 0, -0.5, 0, 0]
    assert advantages[1].tolist() == [0, 0, 0.75, 0.75]


def test_a_branch_is_compared_from_its_own_first_turn_on(make_record):
    turns = [[(False, [1]), (True, [2])], [(False, [3]), (True, [4])]]
    trunk = make_record("s0", "g", turns, [4.0, 2.0])
    branch = replace(make_record("s0", "g", [[(False, [1, 2])], turns[1]], [0.0, 0.0], branch=1), own_turn=1)
    other = make_record("s1", "g", turns, [0.0, 0.0])
    advantages = token_advantages([trunk, branch, other], GRPO_PLAIN)
    # turn 0: the trunk alone, 6 against 0; turn 1: 2 and 0 of the branches, their mean 1 against 0
    assert advantages[0].tolist() == [0, 3.0, 0, 1.5]
    assert advantages[1].tolist() == [0, 0, 0, -0.5]
    assert advantages[2].tolist() == [0, -3.0, 0, -0.5]


observation = st.lists(st.integers(0, 300), min_size=1, max_size=40)


@given(first=observation, second=observation, discount=st.sampled_from([1.0, 0.9]))
def test_observations_do_not_change_the_advantages_of_actions(make_record, first, second, discount):
    def action_advantages(observed: list[int]) -> list[float]:
        turns = [[(False, [1]), (True, [2, 3])], [(False, observed), (True, [4])], [(False, observed), (True, [5])]]
        records = [make_record("s0", "g", turns, [0.0, 0.2, 1.0]), make_record("s1", "g", turns, [0.0, 0.0, 0.0])]
        config = AlgorithmConfig(discount=discount)
        advantages = token_advantages(records, config)
        return advantages[0].numpy()[np.asarray(records[0].loss_mask)].tolist()

    assert action_advantages(first) == action_advantages(second)
