"""Who earned what: rewards moved along the tree of a rollout's branches before anything is scored.

    turn 0 ─ turn 1 ─ turn 2        branch 0, to where the rollout ended
               ├───── turn 2'       branch 1, a parallel sample of turn 2: the trunk earns the mean of both
               └───── turn 2"       branch 2, a sub-agent that turn 1 called: the trunk earns its rewards as well

Rewards of completions travel so, discounted from turn to turn along the branch, never by the order in which calls
came. The final reward travels along each branch by itself: it stands at the end of every one (tokens/records.py).
Pure functions over records; imports no torch.

What each rollout of a step earns from each of its turns on: what groups are compared by. Pure; imports no torch.

It knows records and rewards, and neither groups nor baselines.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from areal_agent.types import TokenRecord

Node = tuple[int, int]
"""A turn in the tree: branch, turn."""


def with_parts(
    records: Sequence[TokenRecord],
    rewards: Mapping[str, float],
    parts: Mapping[str, Mapping[str, float]],
    weights: Mapping[str, float],
) -> tuple[list[TokenRecord], dict[str, float]]:
    """Add the weighted sum of named parts to the final reward of each rollout: R_i + sum_name weight_name part_i_name.

    A part that a rollout did not name adds nothing to it; one without a weight is a metric alone. `rewards` and `parts`
    are by session id. Returns the records, and the total rewards.
    """
    extra = {
        session_id: sum(weight * parts.get(session_id, {}).get(name, 0.0) for name, weight in weights.items())
        for session_id in rewards
    }
    if not any(extra.values()):
        return list(records), dict(rewards)
    paid = [_with_final(record, extra[record.session_id]) for record in records]
    return paid, {session_id: reward + extra[session_id] for session_id, reward in rewards.items()}


def _with_final(record: TokenRecord, more: float) -> TokenRecord:
    turn_rewards = record.turn_rewards.copy()
    turn_rewards[-1] += more
    return replace(record, turn_rewards=turn_rewards, final_reward=float(np.float32(record.final_reward + more)))


def with_causal_credit(records: Sequence[TokenRecord], discount: float) -> list[TokenRecord]:
    """Records whose turn rewards, summed along each branch alone, give every turn what its whole subtree earned.

    The return of a turn: G = r + discount * sum over what follows from it, parallel samples taken as their mean. Then
    the turn's own reward is set to G - discount * G_next, so that estimators need to know nothing of branches. Rollouts
    without forks, or without rewards of completions, come back as they are.
    """
    by_session: dict[str, list[TokenRecord]] = defaultdict(list)
    for record in records:
        by_session[record.session_id].append(record)
    credited = {
        (record.session_id, record.branch): record
        for branches in by_session.values()
        for record in (_credit_session(branches, discount) if _is_moved(branches) else branches)
    }
    return [credited[record.session_id, record.branch] for record in records]


def _is_moved(branches: Sequence[TokenRecord]) -> bool:
    return len(branches) > 1 and any(_without_final(record).any() for record in branches)


def _without_final(record: TokenRecord) -> NDArray[np.float64]:
    """The rewards of completions, by turn."""
    rewards = record.turn_rewards.astype(np.float64)
    rewards[-1] -= record.final_reward
    return rewards


def _credit_session(branches: Sequence[TokenRecord], discount: float) -> list[TokenRecord]:
    """A branch forks from one with a smaller number, so going down every subtree is known before it is needed."""
    returns: dict[int, NDArray[np.float64]] = {}
    children: dict[Node, list[TokenRecord]] = defaultdict(list)
    credited: list[TokenRecord] = []
    for record in sorted(branches, key=lambda one: -one.branch):
        own = _without_final(record)
        earned = np.zeros(len(own) + 1)  # G of each turn, and 0 behind the last
        for turn in reversed(range(len(own))):
            forks = children[record.branch, turn]
            following = _mean_of_samples(record, turn, forks, earned, returns, discount)
            earned[turn] = own[turn] + following
        returns[record.branch] = earned
        if record.parent_branch is not None and record.fork_turn is not None:
            children[record.parent_branch, record.fork_turn].append(record)
        credited.append(_paid_along(record, earned, discount))
    return credited


def _mean_of_samples(
    record: TokenRecord,
    turn: int,
    forks: Sequence[TokenRecord],
    earned: NDArray[np.float64],
    returns: Mapping[int, NDArray[np.float64]],
    discount: float,
) -> float:
    """What follows from a turn: the sum over calls, of the mean over the parallel samples of a call, discounted."""
    samples: dict[int, list[float]] = defaultdict(list)
    samples[record.branch].append(discount * earned[turn + 1])  # this branch itself goes on
    for fork in forks:
        call = fork.branch if fork.sample_of is None else fork.sample_of
        samples[call].append(discount ** (fork.own_turn - turn) * float(returns[fork.branch][fork.own_turn]))
    return sum(sum(values) / len(values) for values in samples.values())


def _paid_along(record: TokenRecord, earned: NDArray[np.float64], discount: float) -> TokenRecord:
    rewards = earned[:-1] - discount * earned[1:]
    rewards[-1] += record.final_reward
    return replace(record, turn_rewards=rewards.astype(np.float32))


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
