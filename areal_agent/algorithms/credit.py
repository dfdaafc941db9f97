"""Who earned what: rewards moved along the tree of a rollout's branches before anything is scored.

    turn 0 ─ turn 1 ─ turn 2        branch 0, to where the rollout ended
               ├───── turn 2'       branch 1, a parallel sample of turn 2: the trunk earns the mean of both
               └───── turn 2"       branch 2, a sub-agent that turn 1 called: the trunk earns its rewards as well

Rewards of completions travel so, discounted from turn to turn along the branch, never by the order in which calls
came. The final reward travels along each branch by itself: it stands at the end of every one (tokens/records.py).
Pure functions over records; imports no torch.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
