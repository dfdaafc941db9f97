"""Credit assignment along the tree of a rollout's branches, before advantages are computed. Pure functions; no torch.

    turn 0 ─ turn 1 ─ turn 2        branch 0, to where the rollout ended
               ├───── turn 2'       branch 1, a parallel sample of turn 2: the trunk earns the mean of both
               └───── turn 2"       branch 2, a sub-agent that turn 1 called: the trunk earns its rewards as well

Rewards of completions move up this tree, discounted from turn to turn along the branch, whatever the order of the calls
was. The final reward needs no moving: tokens/records.py puts it at the end of every branch.
`returns_by_turn` then gives what each rollout earns from each of its turns on, by which groups are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from areal_agent.algorithms.config import LENGTH, OVERLONG, AlgorithmConfig
from areal_agent.types import TokenRecord, Trajectory

Node = tuple[int, int]
"""A turn in the tree: branch, turn."""
TOLERANCE = 1e-6
"""Rewards with a smaller difference, times their size, are alike: they are added up as 32-bit floats."""


def reward_parts(trajectory: Trajectory, config: AlgorithmConfig) -> dict[str, float]:
    """Return the parts of a rollout's reward by name: its own, and the computed ones that `config` has weights for.

    `length`: the number of sampled tokens over 1000. `overlong`: DAPO's soft punishment (arXiv 2503.14476, eq. 13) of
    the answer that it punishes most; with n tokens of at most L, and c = overlong_buffer L:
    0 if n <= L - c, else (L - c - n) / c, which is -1 for an answer that was cut off.
    """
    answers = [
        (len(one.token_ids), turn.sampling.max_tokens)
        for turn in trajectory.turns
        for one in turn.completions
        if one.id not in trajectory.undelivered
    ]
    share = config.overlong_buffer
    computed = {
        LENGTH: sum(num_tokens for num_tokens, _ in answers) / 1000,
        OVERLONG: min((min(0.0, (1.0 - share - n / limit) / share) for n, limit in answers), default=0.0),
    }
    return {name: part for name, part in computed.items() if name in config.reward_parts} | dict(
        trajectory.rewards.parts
    )


def with_parts(
    records: Sequence[TokenRecord],
    rewards: Mapping[str, float],
    parts: Mapping[str, Mapping[str, float]],
    weights: Mapping[str, float],
) -> tuple[list[TokenRecord], dict[str, float]]:
    """Add the weighted sum of named parts to the final reward of each rollout: R_i + sum_name weight_name part_i_name.

    A part that a rollout did not name adds nothing to it; a part without a weight is only a metric. `rewards` and
    `parts` are by session id. Returns the records and the total rewards.
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
    """Set turn rewards so that their sum along each single branch gives every turn what its whole subtree earned.

    The return of a turn is G = r + discount * (sum over what follows it, parallel samples counted by their mean). The
    turn's own reward becomes G - discount * G_next, so estimators need not handle branches. Rollouts without forks, or
    without rewards of completions, come back unchanged.
    """
    by_session: dict[str, list[TokenRecord]] = defaultdict(list)
    for record in records:
        by_session[record.session_id].append(record)
    credited = {
        (record.session_id, record.branch): record
        for branches in by_session.values()
        for record in _credit_session(branches, discount)
    }
    return [credited[record.session_id, record.branch] for record in records]


def _without_final(record: TokenRecord) -> NDArray[np.float64]:
    """Return the rewards of completions, by turn."""
    rewards = record.turn_rewards.astype(np.float64)
    rewards[-1] -= record.final_reward
    return rewards


def _credit_session(branches: Sequence[TokenRecord], discount: float) -> list[TokenRecord]:
    """Credit the branches of one rollout from the highest number down.

    A branch forks from one with a smaller number, so every subtree is complete before it is needed.
    """
    if len(branches) == 1 or not any(_without_final(record).any() for record in branches):
        return list(branches)
    returns: dict[int, NDArray[np.float64]] = {}
    children: dict[Node, list[TokenRecord]] = defaultdict(list)
    credited: list[TokenRecord] = []
    for record in sorted(branches, key=lambda one: -one.branch):
        own = _without_final(record)
        earned = np.zeros(len(own) + 1)  # G of each turn, and 0 after the last
        for turn in reversed(range(len(own))):
            forks = children[record.branch, turn]
            earned[turn] = own[turn] + _mean_of_samples(record, turn, forks, earned, returns, discount)
        returns[record.branch] = earned
        if record.parent_branch is not None and record.fork_turn is not None:
            children[record.parent_branch, record.fork_turn].append(record)
        rewards = earned[:-1] - discount * earned[1:]
        rewards[-1] += record.final_reward
        credited.append(replace(record, turn_rewards=rewards.astype(np.float32)))
    return credited


def _mean_of_samples(
    record: TokenRecord,
    turn: int,
    forks: Sequence[TokenRecord],
    earned: NDArray[np.float64],
    returns: Mapping[int, NDArray[np.float64]],
    discount: float,
) -> float:
    """Return the discounted return that follows a turn: summed over calls, the mean over each call's samples."""
    samples: dict[int, list[float]] = defaultdict(list)
    samples[record.branch].append(discount * earned[turn + 1])  # this branch itself continues
    for fork in forks:
        call = fork.branch if fork.sample_of is None else fork.sample_of
        samples[call].append(discount ** (fork.own_turn - turn) * float(returns[fork.branch][fork.own_turn]))
    return sum(sum(values) / len(values) for values in samples.values())


Returns = NDArray[np.float64]
"""Returns by turn: [K] of a branch or a rollout, [branches, K] of several branches."""
_Branch = tuple[TokenRecord, Returns]


def rollouts_of(records: Sequence[TokenRecord]) -> dict[str, str]:
    """Return the group of each rollout that has a record, by session id."""
    return {record.session_id: record.group_id for record in records}


def returns_by_turn(
    records: Sequence[TokenRecord], penalties: Sequence[NDArray[np.float64]], discount: float
) -> Returns:
    """V_{i,k} = sum_{j >= k} discount^(j - k) r_j: the return of rollout i from turn k on, less its penalties.

    A rollout that ends before turn k counts there with its last turn, so that one undiscounted reward at the end is the
    total reward at every turn. For a forked rollout it is the mean over the branches that own turn k; branches without
    a loss token do not count. Shapes: penalties [M] a record -> [R rollouts, K turns].
    """
    num_turns = _num_turns(records)
    counted = [_counted(one, num_turns) for one in _branches_by_rollout(records, penalties, discount)]
    means = [(returns * is_own).sum(axis=0) / is_own.sum(axis=0) for returns, is_own in counted]
    return np.array(means).reshape(len(means), num_turns)


def earn_alike(
    records: Sequence[TokenRecord], discount: float, tolerance: float, *, compares_turns: bool = False
) -> bool:
    """Return whether the rollouts of one group earn the same, so that every advantage against its baseline is zero.

    They do if V_{i,k} = V_{j,k} for each turn k, and within a forked rollout for all branches that `returns_by_turn`
    averages. With `compares_turns` all turns must earn the same too, since turns that meet in one state are compared.
    Values are the same if they differ by at most `tolerance` times their size, or times 1 if that is larger.
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
    """Group the branches in the order of `rollouts_of`, every branch extended to the longest."""
    num_turns = _num_turns(records)
    branches: dict[str, list[_Branch]] = {name: [] for name in rollouts_of(records)}
    for record, penalty in zip(records, penalties, strict=True):
        returns = record.turn_rewards.astype(np.float64)
        np.subtract.at(returns, record.turn_index[record.loss_mask], penalty)
        for turn in reversed(range(len(returns) - 1)):
            returns[turn] += discount * returns[turn + 1]
        held = np.pad(returns, (0, num_turns - len(returns)), mode="edge")
        branches[record.session_id].append((record, held))
    return branches.values()


def _counted(branches: Sequence[_Branch], num_turns: int) -> tuple[Returns, NDArray[np.bool_]]:
    """Return one rollout's branches that count, and which turns each of them owns; both [branches, K]."""
    counted = [one for one in branches if one[0].loss_mask.any()] or branches
    returns = np.array([held for _, held in counted])
    first = np.array([record.own_turn for record, _ in counted])
    is_own = first[:, None] <= np.maximum(np.arange(num_turns), first.min())
    return returns, is_own
