"""Baselines, returns and their normalisation: what an advantage is made of. Pure functions.

scoring.py puts them together. Groups are found by id, never by stride; a failed sibling is simply not there. Time
counts in actions: observations between them, however long, take no time.
Shapes: R rollouts (or whatever is compared), M loss tokens of one record, N loss tokens of all records.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to a standard deviation: what differs by noise alone is not blown up."""


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


def gae(rewards: Sequence[float], values: Sequence[float], discounts: Sequence[float], gae_lambda: float) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the loss tokens of one record.

    d_m = r_m + g_m V_{m+1} - V_m,  A_m = d_m + g_m lambda A_{m+1}, where m + 1 is the next *loss* token, however many
    observations lie between. The last one is terminal: nothing is bootstrapped, V_M = A_M = 0. g_m is the discount from
    token m to the next: 1 within a turn. A_m + V_m is the return that a critic learns. Not normalised.
    Shapes: rewards [M], values [M], discounts [M] (the last is not used) -> [M] float64.
    """
    assert len(rewards) == len(values) == len(discounts), (len(rewards), len(values), len(discounts))
    advantages = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for m in reversed(range(len(rewards))):
        delta = rewards[m] + discounts[m] * next_value - values[m]
        advantages[m] = delta + discounts[m] * gae_lambda * next_advantage
        next_value, next_advantage = values[m], advantages[m]
    return torch.tensor(advantages, dtype=torch.float64)


def returns_by_token(rewards: Sequence[float], discounts: Sequence[float]) -> Tensor:
    """What each loss token earns from itself on: G_m = r_m + g_m G_{m+1}, which is `gae` without a critic at lambda 1.

    Shapes: rewards [M], discounts [M] -> [M] float64.
    """
    return gae(rewards, [0.0] * len(rewards), discounts, 1.0)


def whitened(values: Tensor) -> Tensor:
    """Minus the mean, over the standard deviation (over n) + STD_EPSILON, of all values at once.

    REINFORCE++ (arXiv 2501.03262) normalises so over the global batch; its variant with a group's baseline is not this.
    Shapes: [N] -> [N].
    """
    assert values.ndim == 1, values.shape
    if len(values) == 0:
        return values
    return (values - values.mean()) / (values.std(correction=0) + STD_EPSILON)
