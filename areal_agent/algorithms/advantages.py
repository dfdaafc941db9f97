"""The advantage of every token of a train step, as the algorithm section chooses it. Pure functions.

    records ─▶ Timeline (loss tokens, rewards, discounts) ─▶ baselines, returns or GAE ─▶ one [T] tensor a record

A *rollout* is one answer of a group (a session). It may have several records (branches) but counts once in every group
statistic. Groups are found by id, so a failed sibling is simply missing. Time counts in turns and loss tokens:
observations take no time, however long they are.
Shapes: R rollouts; T tokens and M loss tokens of one record; N loss tokens of all records.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import TOLERANCE, returns_by_turn, rollouts_of
from areal_agent.types import TokenRecord

STD_EPSILON = 1e-4
"""Added to every standard deviation, so that differences from noise alone are not blown up."""
Records = Sequence[TokenRecord]
PerLossToken = Sequence[Tensor]
"""One [M] tensor for each record."""
AdvantageFunction = Callable[[Records, Mapping[str, float], AlgorithmConfig], Sequence[Tensor]]
"""A user's own advantage: records, total rewards by session id, config -> one [T] tensor for each record."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """The M loss tokens of one record, in order.

    A turn's reward is paid at its last loss token. If a turn has none, its reward goes, discounted, to the last loss
    token before it, and is dropped if there is none.
    """

    turns: NDArray[np.int64]  # [M]
    rewards: NDArray[np.float64]  # [M]
    discounts: NDArray[np.float64]  # from each token to the next: discount ** (number of turns between); 1 for the last

    @classmethod
    def of(cls, record: TokenRecord, discount: float) -> Self:
        turns = record.turn_index[record.loss_mask].astype(np.int64)
        rewards = np.zeros(len(turns))
        for turn, reward in enumerate(record.turn_rewards.astype(np.float64)):
            payee = int(np.searchsorted(turns, turn, side="right")) - 1  # turn numbers never decrease
            if payee >= 0:
                rewards[payee] += discount ** float(turn - turns[payee]) * reward
        steps = np.diff(turns, append=turns[-1:])
        return cls(turns=turns, rewards=rewards, discounts=discount ** steps.astype(np.float64))


def token_advantages(
    records: Records,
    config: AlgorithmConfig,
    *,
    values: PerLossToken | None = None,
    penalties: PerLossToken | None = None,
) -> list[Tensor]:
    """The advantage of every token; 0 where `loss_mask` is False. Observations do not enter it.

    `values` are a critic's (gae). `penalties` are subtracted from the reward of each loss token (a divergence in the
    reward).
    Shapes: values and penalties [M] a record -> one [T] float32 tensor a record, in order.
    """
    lines = [Timeline.of(record, config.discount) for record in records]
    taken = [torch.zeros(len(line.turns)) for line in lines] if penalties is None else penalties
    match config.advantage:
        case "gae":
            assert values is not None, "gae needs values"
            scored = gae_advantages(lines, values, taken, config.gae_lambda)
        case "reinforce_pp":
            scored = _returns(lines, taken)
        case _:
            scored = _against_the_group(records, lines, taken, config)
    if config.whitens:
        scored = _normalised(scored)
    return [_laid_out(record, of_record) for record, of_record in zip(records, scored, strict=True)]


def value_targets(
    records: Records, values: PerLossToken, config: AlgorithmConfig, *, penalties: PerLossToken | None = None
) -> list[Tensor]:
    """The targets of a critic: A_m + V_m with `gae`'s advantages before normalisation, the lambda-return.

    Shapes: values and penalties [M] a record -> one [M] float32 tensor a record.
    """
    lines = [Timeline.of(record, config.discount) for record in records]
    taken = [torch.zeros(len(line.turns)) for line in lines] if penalties is None else penalties
    advantages = gae_advantages(lines, values, taken, config.gae_lambda)
    return [(one + value).float() for one, value in zip(advantages, values, strict=True)]


def gae_advantages(
    lines: Sequence[Timeline], values: PerLossToken, penalties: PerLossToken, gae_lambda: float
) -> list[Tensor]:
    """`gae` of each record, before it is normalised. Shapes: values and penalties [M] -> [M] float64 a record."""
    return [
        gae(_paid(line, penalty), value.tolist(), line.discounts.tolist(), gae_lambda)
        for line, value, penalty in zip(lines, values, penalties, strict=True)
    ]


def _against_the_group(
    records: Records, lines: Sequence[Timeline], penalties: PerLossToken, config: AlgorithmConfig
) -> list[Tensor]:
    """Compare the return of each token with what its group earned from the same turn on.

    A_m = (G_m - b_ik) / s_ik for a token of turn k of rollout i, where b is `group_mean` (grpo, arXiv 2402.03300;
    dr_grpo, 2503.20783) or `leave_one_out` (rloo) of the group's returns from turn k on, and s is their `group_std` +
    STD_EPSILON, or 1 without normalisation. 0 in groups of one rollout, and exactly 0 where all rollouts earn the same.
    With a single undiscounted reward at the end, these returns equal the total reward at every turn, as in the papers.
    In general totals would be wrong: rollouts that are all alike would be blamed in each turn for what earlier turns
    earned, and their spread of 0 would amplify that.
    """
    returns = _returns(lines, penalties)
    if not records:
        return returns
    compared = torch.from_numpy(returns_by_turn(records, [one.double().numpy() for one in penalties], config.discount))
    groups = _numbered(list(rollouts_of(records).values()))
    baseline = leave_one_out if config.advantage == "rloo" else group_mean
    baselines = torch.stack([baseline(of_turn, groups) for of_turn in compared.unbind(1)], dim=1)  # [R, K]
    scales = torch.stack([_scales(of_turn, groups, config) for of_turn in compared.unbind(1)], dim=1)  # [R, K]
    number_of = {session_id: number for number, session_id in enumerate(rollouts_of(records))}
    scored: list[Tensor] = []
    for record, line, of_record in zip(records, lines, returns, strict=True):
        place = number_of[record.session_id], torch.from_numpy(line.turns)
        scored.append(_above(of_record, baselines[place]) * scales[place])
    if config.step_group_weight == 0.0:
        return scored
    extra = step_advantages(records, lines, returns, config)
    return [one + config.step_group_weight * other for one, other in zip(scored, extra, strict=True)]


def _above(values: Tensor, baselines: Tensor) -> Tensor:
    """Values minus baselines; exactly 0 where they differ by rounding alone."""
    is_level = torch.isclose(values, baselines, rtol=TOLERANCE, atol=TOLERANCE)
    return (values - baselines).masked_fill(is_level, 0.0)


def _scales(values: Tensor, groups: Tensor, config: AlgorithmConfig) -> Tensor:
    """One over the spread of each value's group; 0 in groups of one."""
    spreads = group_std(values, groups) + STD_EPSILON if config.divides_by_std else torch.ones_like(values)
    return torch.where(group_size(groups) > 1, 1.0 / spreads, 0.0)


def step_advantages(
    records: Records, lines: Sequence[Timeline], returns: PerLossToken, config: AlgorithmConfig
) -> list[Tensor]:
    """The return of each turn compared with turns of its group that met the same state (GiGPO, arXiv 2505.10978).

    A_k = (G_k - mean G) / s over all turns, of all rollouts of the group, with the same state. The state of a turn is
    the tokens between the previous answer and its own first loss token, whatever came earlier. G_k is the return of the
    turn's first loss token, and s is as in the advantage of the whole rollout. A state that was met once gets 0.
    Turns without loss tokens do not count. Shapes: returns [M] a record -> [M] a record.
    """
    firsts = [_first_of_each_turn(line) for line in lines]
    states = [
        (record.group_id, _observation(record, int(line.turns[first])))
        for record, line, of_record in zip(records, lines, firsts, strict=True)
        for first in of_record
    ]
    met = [one[first] for one, of_record in zip(returns, firsts, strict=True) for first in of_record]
    if not met:
        return list(returns)
    values, groups = torch.stack(met), _numbered(states)
    by_turn = _above(values, group_mean(values, groups)) * _scales(values, groups, config)
    of_records = by_turn.split([len(of_record) for of_record in firsts])
    return [_spread(one, first, len(line.turns)) for one, first, line in zip(of_records, firsts, lines, strict=True)]


def _first_of_each_turn(line: Timeline) -> list[int]:
    """Return the indices of the loss tokens that begin a turn."""
    turns = line.turns.tolist()
    return [m for m, turn in enumerate(turns) if m == 0 or turns[m - 1] != turn]


def _observation(record: TokenRecord, turn: int) -> bytes:
    """Return the tokens of a turn before its first loss token."""
    of_turn = record.turn_index == turn
    return record.token_ids[of_turn][: int(record.loss_mask[of_turn].argmax())].tobytes()


def _spread(by_turn: Tensor, firsts: Sequence[int], num_tokens: int) -> Tensor:
    """Repeat each turn's value for all its loss tokens."""
    lengths = [end - first for first, end in zip(firsts, [*firsts[1:], num_tokens], strict=True)]
    return by_turn.repeat_interleave(torch.tensor(lengths, dtype=torch.long))


def _numbered(names: Sequence[Hashable]) -> Tensor:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.long)


def _returns(lines: Sequence[Timeline], penalties: PerLossToken) -> list[Tensor]:
    return [
        returns_by_token(_paid(line, penalty), line.discounts.tolist())
        for line, penalty in zip(lines, penalties, strict=True)
    ]


def _paid(line: Timeline, penalty: Tensor) -> list[float]:
    return (torch.from_numpy(line.rewards) - penalty.double()).tolist()


def _normalised(scores: Sequence[Tensor]) -> list[Tensor]:
    """Whiten over the loss tokens of all records."""
    flat = whitened(torch.cat([torch.zeros(0, dtype=torch.float64), *scores]))
    return list(flat.split([len(one) for one in scores]))


def _laid_out(record: TokenRecord, of_loss_tokens: Tensor) -> Tensor:
    """Place the values of loss tokens among all tokens, zeros elsewhere: [M] -> [T]."""
    laid = torch.zeros(len(record.token_ids), dtype=torch.float32)
    laid[torch.from_numpy(record.loss_mask)] = of_loss_tokens.float()
    return laid


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
    """The return of each loss token, G_m = r_m + g_m G_{m+1}, which is `gae` with zero values and lambda 1.

    Shapes: rewards [M], discounts [M] -> [M] float64.
    """
    return gae(rewards, [0.0] * len(rewards), discounts, 1.0)


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
    """The number of rollouts in each rollout's group. Shapes: groups [R] -> [R]."""
    return _group_sum(torch.ones_like(groups), groups)


def _group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """The sum of `values` over each rollout's group, for each rollout: [R] -> [R]."""
    assert values.ndim == 1 and values.shape == groups.shape, (values.shape, groups.shape)
    distinct, position = groups.unique(return_inverse=True)
    return values.new_zeros(len(distinct)).index_add(0, position, values)[position]


def whitened(values: Tensor) -> Tensor:
    """All values minus their mean, over their standard deviation (over n) + STD_EPSILON.

    REINFORCE++ (arXiv 2501.03262) normalises over the global batch in this way: the returns, or what is left of them
    after the group's mean. Shapes: [N] -> [N].
    """
    assert values.ndim == 1, values.shape
    if len(values) == 0:
        return values
    return (values - values.mean()) / (values.std(correction=0) + STD_EPSILON)


def own_advantages(
    function: AdvantageFunction, records: Records, rewards: Mapping[str, float], config: AlgorithmConfig
) -> list[Tensor]:
    """Call the user's function and check what it returns: one [T] tensor for each record. Raises ValueError."""
    returned = cast(object, function(records, rewards, config))
    given = list(cast(Sequence[object], returned)) if isinstance(returned, Sequence) else [returned]
    tensors = [one.detach().float() for one in given if isinstance(one, Tensor)]
    if len(tensors) != len(given):
        raise ValueError(
            f"advantage {config.advantage!r} returned {type(returned).__name__} of "
            f"{', '.join(sorted({type(one).__name__ for one in given}))}; return a list with one torch tensor for each "
            "record"
        )
    expected = [len(record.token_ids) for record in records]
    if [tuple(one.shape) for one in tensors] != [(length,) for length in expected]:
        raise ValueError(
            f"advantage {config.advantage!r} returned tensors of shapes {[tuple(one.shape) for one in tensors][:4]} "
            f"for records of {expected[:4]} tokens; return one value for each token of each record"
        )
    for record, one in zip(records, tensors, strict=True):
        if not bool(one[torch.from_numpy(record.loss_mask)].isfinite().all()):
            raise ValueError(
                f"advantage {config.advantage!r} returned NaN or infinity for a loss token of session "
                f"{record.session_id!r}: that would spoil the whole batch; return finite numbers"
            )
    return tensors
