"""Advantages: how much better a token's return was than what its group earned. Pure functions.

A *rollout* is one answer of a group (a session); it may have several records (branches), and counts once in every
group statistic. Groups are found by id, never by stride; a failed sibling is simply not there.
Shapes: R rollouts, K turns and T tokens of one record.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.types import TokenRecord

STD_EPSILON = 1e-4
"""Added to a group's standard deviation: rewards that differ by noise alone are not blown up."""


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """The mean reward of each rollout's group, itself included: the baseline of GRPO (arXiv 2402.03300, section 4.1).

    b_i = mean_{j in group(i)} R_j. Shapes: rewards [R], groups [R] (any integers) -> [R].
    """
    return _group_sum(rewards, groups) / group_size(groups)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """The mean reward of the *other* rollouts of each rollout's group: the baseline of RLOO (arXiv 2402.14740).

    b_i = mean_{j in group(i), j != i} R_j; a rollout that is alone in its group is its own baseline, so that its
    advantage is 0. Shapes: rewards [R], groups [R] -> [R].
    """
    sizes = group_size(groups)
    others = (_group_sum(rewards, groups) - rewards) / (sizes - 1).clamp_min(1)
    return torch.where(sizes > 1, others, rewards)


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    """The sample standard deviation (over n - 1) of the rewards of each rollout's group; 0 for a group of one.

    Shapes: rewards [R], groups [R] -> [R].
    """
    squares = _group_sum((rewards - group_mean(rewards, groups)).square(), groups)
    return (squares / (group_size(groups) - 1).clamp_min(1)).sqrt()


def group_size(groups: Tensor) -> Tensor:
    """How many rollouts are in each rollout's group. Shapes: groups [R] -> [R]."""
    return _group_sum(torch.ones_like(groups), groups)


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """The sum of `values` over each rollout's group, for each rollout: [R] -> [R]."""
    assert values.ndim == 1 and values.shape == groups.shape, (values.shape, groups.shape)
    distinct, position = groups.unique(return_inverse=True)
    return values.new_zeros(len(distinct)).index_add(0, position, values)[position]


def returns_to_go(turn_rewards: Tensor, discount: float) -> Tensor:
    """What each turn earns from itself on: G_k = r_k + discount * G_{k+1}.

    Time counts in turns: tokens within a turn share its return, and the observations between turns, however long,
    take no time. Shapes: turn_rewards [K] -> [K].
    """
    assert turn_rewards.ndim == 1, turn_rewards.shape
    returns = turn_rewards.clone()
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def token_advantages(
    records: Sequence[TokenRecord], rewards: Mapping[str, float], config: AlgorithmConfig
) -> list[Tensor]:
    """The advantage of every token: the return-to-go of its turn minus a baseline, over the spread of the group.

    A_t = (G_turn(t) - b_rollout) / s_group, where b is `group_mean` (grpo) or `leave_one_out` (rloo) of the rollouts'
    *total* rewards and s is `group_std` + STD_EPSILON, or 1 without normalisation. 0 where `loss_mask` is False and
    in groups of one rollout. Observations do not enter it: neither their values nor their lengths.

    `rewards` holds the total reward of each rollout that has a record, by session id.
    Shapes: one [T] float32 tensor a record, in order.
    """
    group_of = {record.session_id: record.group_id for record in records}  # one entry a rollout
    numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(group_of.values()))}
    groups = torch.tensor([numbers[group_id] for group_id in group_of.values()])  # [R]
    # in float32 first, as records hold rewards: equal rewards then cancel exactly
    totals = torch.tensor([rewards[session_id] for session_id in group_of], dtype=torch.float32).double()  # [R]

    baselines = leave_one_out(totals, groups) if config.preset == "rloo" else group_mean(totals, groups)
    spreads = group_std(totals, groups) + STD_EPSILON if config.divides_by_std else torch.ones_like(totals)
    scales = torch.where(group_size(groups) > 1, 1.0 / spreads, 0.0)

    rollout_of = {session_id: number for number, session_id in enumerate(group_of)}
    chosen = [rollout_of[record.session_id] for record in records]
    return [
        _of_record(record, baselines[rollout], scales[rollout], config.discount)
        for record, rollout in zip(records, chosen, strict=True)
    ]


def _of_record(record: TokenRecord, baseline: Tensor, scale: Tensor, discount: float) -> Tensor:
    returns = returns_to_go(torch.from_numpy(record.turn_rewards).double(), discount)  # [K]
    by_turn = (returns - baseline) * scale
    by_token = by_turn[torch.from_numpy(record.turn_index).long()]  # [T]
    return torch.where(torch.from_numpy(record.loss_mask), by_token, 0.0).float()
