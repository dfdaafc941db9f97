"""The metrics of one batch: rewards, rollouts, staleness and tokens, by name. Pure functions; see docs/metrics.md."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from areal_agent.types import Completion, FinishReason, RolloutBatch, Trajectory, TrajectoryGroup

Metrics = dict[str, Any]
Values = Sequence[float]


def describe_batch(batch: RolloutBatch, success_reward: float, sources: Mapping[str, str] | None = None) -> Metrics:
    """Return all metrics of what is trained in one step. `sources` maps task ids to the names of their sources."""
    trained = batch.trained
    ids = {one.session_id for one in trained}
    groups = [[one for one in group.trajectories if one.session_id in ids] for group in batch.groups]
    return {
        **_rewards(trained, groups, success_reward),
        **_rewards_by_source(batch.groups, ids, sources or {}),
        **_rollouts(batch),
        **_latencies(trained),
        **_staleness(batch),
        **_tokens(batch),
        **_means("reward/part", [one.rewards.parts for one in trained]),
        **_means("logged", [one.logged for one in trained]),
    }


def pass_at(k: int, num_samples: int, num_successes: int) -> float:
    """Return the chance that one of k samples succeeds, estimated without bias from n >= k (Chen et al. 2021, eq. 1).

    pass@k = 1 - C(n - c, k) / C(n, k), with c successes among the n.

    >>> pass_at(2, num_samples=4, num_successes=1)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def _rewards(trained: Sequence[Trajectory], groups: Sequence[Sequence[Trajectory]], success_reward: float) -> Metrics:
    rewards = [one.rewards.total for one in trained]
    spreads = [statistics.pstdev([one.rewards.total for one in group] or [0.0]) for group in groups]
    counts = [(len(group), sum(one.rewards.total >= success_reward for one in group)) for group in groups]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/success": _mean([float(reward >= success_reward) for reward in rewards]),
        "reward/zero_std_groups": sum(spread == 0.0 for spread in spreads) / max(1, len(groups)),
        **{f"reward/pass_at_{k}": value for k, value in _passes(counts).items()},
    }


def _passes(counts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Return pass@k for k = 2, 4, 8 ...: means over the groups of (rollouts, successes) with at least k rollouts."""
    largest = max((size for size, _ in counts), default=0)
    return {
        k: _mean([pass_at(k, size, successes) for size, successes in counts if size >= k])
        for k in (2**power for power in range(1, largest.bit_length()))
    }


def _rewards_by_source(groups: Iterable[TrajectoryGroup], ids: set[str], sources: Mapping[str, str]) -> Metrics:
    by_source: dict[str, list[float]] = {}
    for group in groups:
        if (source := sources.get(group.task_id)) is not None:
            rewards = [one.rewards.total for one in group.trajectories if one.session_id in ids]
            by_source.setdefault(source, []).extend(rewards)
    return {f"reward/mean/{source}": _mean(rewards) for source, rewards in by_source.items()} | {
        f"reward/std/{source}": _std(rewards) for source, rewards in by_source.items()
    }


def _rollouts(batch: RolloutBatch) -> Metrics:
    trained = batch.trained
    num_versions = [float(len(one.sampled_steps())) for one in trained]
    num_branches = Counter(record.session_id for record in batch.records)
    return {
        "rollouts/trained": len(trained),
        "rollouts/turns": _mean([float(len(one.turns)) for one in trained]),
        "rollouts/versions": _mean(num_versions),
        "rollouts/spanning": sum(number > 1 for number in num_versions),
        "rollouts/interrupted_completions": sum(
            len(set(completion.version_steps())) > 1 for one in trained for completion in _completions(one)
        ),
        "rollouts/truncated": _mean([float(_is_truncated(one)) for one in trained]),
        "rollouts/forked": _mean([float(num_branches[one.session_id] > 1) for one in trained]),
    }


def _latencies(trained: Iterable[Trajectory]) -> Metrics:
    rollouts = [one.ended_s - one.started_s for one in trained]
    turns = [turn.ended_s - turn.started_s for one in trained for turn in one.turns]
    return {
        "rollouts/seconds": _mean(rollouts),
        "rollouts/seconds_p50": _percentile(rollouts, 50),
        "rollouts/seconds_p95": _percentile(rollouts, 95),
        "turns/seconds_p50": _percentile(turns, 50),
        "turns/seconds_p95": _percentile(turns, 95),
    }


def _staleness(batch: RolloutBatch) -> Metrics:
    """Return the staleness of the tokens in the loss: `batch.step - 1` minus the version that sampled the token."""
    versions = [record.versions[record.loss_mask] for record in batch.records]
    staleness = batch.step - 1 - np.concatenate([*versions, np.zeros(0, np.int32)])
    if not len(staleness):
        return {"staleness/mean": 0.0, "staleness/max": 0}
    ages, counts = np.unique(staleness, return_counts=True)
    return {
        "staleness/mean": float(staleness.mean()),
        "staleness/max": int(staleness.max()),
        **{
            f"staleness/share/{int(age)}": float(count / len(staleness))
            for age, count in zip(ages, counts, strict=True)
        },
    }


def _tokens(batch: RolloutBatch) -> Metrics:
    num_trained = sum(int(record.loss_mask.sum()) for record in batch.records)
    num_sampled = sum(one.num_sampled_tokens for one in batch.trained)
    return {
        "tokens/trained": num_trained,
        "tokens/masked_fraction": 1.0 - num_trained / num_sampled if num_sampled else 0.0,
    }


def _means(prefix: str, named: Iterable[Mapping[str, Any]]) -> Metrics:
    """Return the mean of every number by its name, over the rollouts that have it."""
    by_name: dict[str, list[float]] = {}
    for values in named:
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                by_name.setdefault(name, []).append(float(value))
    return {f"{prefix}/{name}": _mean(values) for name, values in by_name.items()}


def _completions(trajectory: Trajectory) -> Iterable[Completion]:
    return (completion for turn in trajectory.turns for completion in turn.completions)


def _is_truncated(trajectory: Trajectory) -> bool:
    """Return whether any of its answers was cut at `max_tokens` or at the end of the context."""
    return any(one.finish_reason is FinishReason.LENGTH for one in _completions(trajectory))


def _mean(values: Values) -> float:
    return statistics.fmean(values) if values else 0.0


def _std(values: Values) -> float:
    return statistics.pstdev(values) if values else 0.0


def _percentile(values: Values, percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0
