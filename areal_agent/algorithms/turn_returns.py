"""What each rollout of a step earns from each of its turns on: what groups are compared by. Pure; imports no torch.

It knows records and rewards, and neither groups nor baselines.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_agent.types import TokenRecord


def rollouts_of(records: Sequence[TokenRecord]) -> dict[str, str]:
    """The group of each rollout that has a record, by session id."""
    return {record.session_id: record.group_id for record in records}


def returns_by_turn(
    records: Sequence[TokenRecord], penalties: Sequence[NDArray[np.float64]], discount: float
) -> NDArray[np.float64]:
    """V_{i,k} = sum_{j >= k} discount^(j - k) r_j: the return of rollout i from turn k on, less its penalties.

    A rollout that ends before turn k stands there with its last turn, so that one reward at the end, not discounted, is
    the total reward at every turn. Of a forked rollout it is the mean over the branches that have turn k to themselves;
    branches without a loss token do not count. Shapes: penalties [M] a record -> [R rollouts, K turns].
    """
    num_turns = max((len(record.turn_rewards) for record in records), default=0)
    branches: dict[str, list[tuple[TokenRecord, NDArray[np.float64]]]] = {name: [] for name in rollouts_of(records)}
    for record, penalty in zip(records, penalties, strict=True):
        branches[record.session_id].append((record, _held(_of_record(record, penalty, discount), num_turns)))
    return np.array([_over_branches(one, num_turns) for one in branches.values()]).reshape(len(branches), num_turns)


def _of_record(record: TokenRecord, penalty: NDArray[np.float64], discount: float) -> NDArray[np.float64]:
    returns = record.turn_rewards.astype(np.float64)
    np.subtract.at(returns, record.turn_index[record.loss_mask], penalty)
    for turn in reversed(range(len(returns) - 1)):
        returns[turn] += discount * returns[turn + 1]
    return returns


def _held(returns: NDArray[np.float64], num_turns: int) -> NDArray[np.float64]:
    return np.pad(returns, (0, num_turns - len(returns)), mode="edge")


def _over_branches(branches: Sequence[tuple[TokenRecord, NDArray[np.float64]]], num_turns: int) -> NDArray[np.float64]:
    counted = [one for one in branches if one[0].loss_mask.any()] or branches
    returns = np.array([held for _, held in counted])  # [branches, K]
    first = np.array([record.own_turn for record, _ in counted])
    is_own = first[:, None] <= np.maximum(np.arange(num_turns), first.min())
    return (returns * is_own).sum(axis=0) / is_own.sum(axis=0)
