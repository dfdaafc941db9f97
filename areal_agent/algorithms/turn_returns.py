"""What each rollout of a step earns from each of its turns on: what groups are compared by. Pure; imports no torch.

It knows records and rewards, and neither groups nor baselines.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from areal_agent.types import TokenRecord

Returns = NDArray[np.float64]
"""Returns by turn, [K] of a branch or a rollout, [branches, K] of several."""
_Branch = tuple[TokenRecord, Returns]


def rollouts_of(records: Sequence[TokenRecord]) -> dict[str, str]:
    """The group of each rollout that has a record, by session id."""
    return {record.session_id: record.group_id for record in records}


def returns_by_turn(
    records: Sequence[TokenRecord], penalties: Sequence[NDArray[np.float64]], discount: float
) -> Returns:
    """V_{i,k} = sum_{j >= k} discount^(j - k) r_j: the return of rollout i from turn k on, less its penalties.

    A rollout that ends before turn k stands there with its last turn, so that one reward at the end, not discounted, is
    the total reward at every turn. Of a forked rollout it is the mean over the branches that have turn k to themselves;
    branches without a loss token do not count. Shapes: penalties [M] a record -> [R rollouts, K turns].
    """
    branches = list(_branches_by_rollout(records, penalties, discount))
    num_turns = _num_turns(records)
    return np.array([_over_branches(one, num_turns) for one in branches]).reshape(len(branches), num_turns)


def earn_alike(
    records: Sequence[TokenRecord], discount: float, tolerance: float, *, compares_turns: bool = False
) -> bool:
    """Whether the rollouts of one group cannot be told apart: every advantage against its baseline is zero.

    From each turn k on all of them earn the same, V_{i,k} = V_{j,k}, and within a forked rollout so do all branches
    that `returns_by_turn` takes the mean of. With `compares_turns` all turns must earn the same, too, as they are
    compared where they meet in one state. The same: apart by at most `tolerance` of the size, or of 1 if that is more.
    """
    num_turns = _num_turns(records)
    unpenalised = [np.zeros(int(record.loss_mask.sum())) for record in records]
    pairs = [_counted(one, num_turns) for one in _branches_by_rollout(records, unpenalised, discount)]
    returns, is_own = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    low, high = np.where(is_own, returns, np.inf).min(axis=0), np.where(is_own, returns, -np.inf).max(axis=0)  # [K]
    if compares_turns:
        low, high = low.min(), high.max()
    size = np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))
    return bool(np.all(high - low <= tolerance * size))


def _num_turns(records: Sequence[TokenRecord]) -> int:
    return max((len(record.turn_rewards) for record in records), default=0)


def _branches_by_rollout(
    records: Sequence[TokenRecord], penalties: Sequence[NDArray[np.float64]], discount: float
) -> Iterable[Sequence[_Branch]]:
    """In the order of `rollouts_of`; every branch as long as the longest."""
    num_turns = _num_turns(records)
    branches: dict[str, list[_Branch]] = {name: [] for name in rollouts_of(records)}
    for record, penalty in zip(records, penalties, strict=True):
        branches[record.session_id].append((record, _held(_of_record(record, penalty, discount), num_turns)))
    return branches.values()


def _of_record(record: TokenRecord, penalty: NDArray[np.float64], discount: float) -> Returns:
    returns = record.turn_rewards.astype(np.float64)
    np.subtract.at(returns, record.turn_index[record.loss_mask], penalty)
    for turn in reversed(range(len(returns) - 1)):
        returns[turn] += discount * returns[turn + 1]
    return returns


def _held(returns: Returns, num_turns: int) -> Returns:
    return np.pad(returns, (0, num_turns - len(returns)), mode="edge")


def _over_branches(branches: Sequence[_Branch], num_turns: int) -> Returns:
    returns, is_own = _counted(branches, num_turns)
    return (returns * is_own).sum(axis=0) / is_own.sum(axis=0)


def _counted(branches: Sequence[_Branch], num_turns: int) -> tuple[Returns, NDArray[np.bool_]]:
    """Of one rollout: returns of the branches that count, and which turns each has to itself; both [branches, K]."""
    counted = [one for one in branches if one[0].loss_mask.any()] or branches
    returns = np.array([held for _, held in counted])
    first = np.array([record.own_turn for record, _ in counted])
    is_own = first[:, None] <= np.maximum(np.arange(num_turns), first.min())
    return returns, is_own
