"""What one train step's row in metrics.jsonl says of its batch, and what the rows of a run add up to.

Names are `group/metric`; times in seconds, counts without a unit. It knows batches and rows, not who writes them.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from areal_agent.observe.step_view import StepView
from areal_agent.types import RolloutBatch, Trajectory

Row = dict[str, Any]


def describe_batch(batch: RolloutBatch, success_reward: float) -> Row:
    """Rewards, staleness, version spans and sizes of what is trained in one step.

    The staleness of a token is `batch.step - 1` minus the version that sampled it; of a trajectory, that of its oldest
    token in the loss.
    """
    trained = batch.trained
    rewards = [one.rewards.total for one in trained]
    versions = np.concatenate([record.versions[record.loss_mask] for record in batch.records] or [np.zeros(0)])
    staleness = batch.step - 1 - versions
    num_groups = len(batch.groups)
    ids = {one.session_id for one in trained}
    spreads = [
        statistics.pstdev([one.rewards.total for one in group.trajectories if one.session_id in ids] or [0.0])
        for group in batch.groups
    ]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "reward/success": _mean([float(reward >= success_reward) for reward in rewards]),
        "reward/zero_std_groups": sum(spread == 0.0 for spread in spreads) / max(1, num_groups),
        "rollouts/trained": len(trained),
        "rollouts/turns": _mean([float(len(one.turns)) for one in trained]),
        "rollouts/seconds": _mean([one.ended_s - one.started_s for one in trained]),
        "rollouts/spanning": sum(len(one.sampled_steps()) > 1 for one in trained),
        "rollouts/interrupted_completions": sum(_num_interrupted(one) for one in trained),
        "staleness/mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness/max": int(staleness.max()) if len(staleness) else 0,
        "tokens/trained": len(versions),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncounted:
    """The time that no row tells of: between the rows of the last process and the first of this one. Unix seconds."""

    since_s: float = 0.0
    until_s: float = 0.0

    @classmethod
    def between(cls, rows: Iterable[Row], step: int, until_s: float) -> Self:
        """From the end of the row of `step`, where this process goes on; without one, from the beginning of time."""
        return cls(since_s=max((row["time"] for row in rows if row["step"] == step), default=0.0), until_s=until_s)

    def num_tokens(self, batch: RolloutBatch) -> int:
        """Tokens sampled in that time, in what a batch trains. Whole turns, by the clock of their gateway."""
        turns = (turn for one in batch.trained for turn in one.turns)
        return sum(
            len(completion.token_ids)
            for turn in turns
            if self.since_s < turn.ended_s <= self.until_s
            for completion in turn.completions
        )


def view_of(row: Row) -> StepView:
    """What a person sees of a row."""
    return StepView(
        step=row["step"],
        reward=row["reward/mean"],
        success=row["reward/success"],
        generated_tokens_per_s=row["tokens_per_s/generated"],
        trained_tokens_per_s=row["tokens_per_s/trained"],
        staleness_mean=row["staleness/mean"],
        staleness_max=row["staleness/max"],
        engine=_shares(row, "seconds/engine/"),
        trainer=_shares(row, "seconds/trainer/"),
    )


def _shares(row: Row, prefix: str) -> dict[str, float]:
    wall_s = row["seconds/wall"] or 1.0
    return {name.removeprefix(prefix): seconds / wall_s for name, seconds in row.items() if name.startswith(prefix)}


def _num_interrupted(trajectory: Trajectory) -> int:
    """Completions with two or more versions inside."""
    return sum(len(set(one.version_steps())) > 1 for turn in trajectory.turns for one in turn.completions)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What the rows of the living lineage add up to: summary.json's figures."""

    steps: int
    trained_tokens: int
    generated_tokens: int  # in the time of the rows, and before it in what they trained
    spanning_fraction: float
    interrupted_completions: int
    max_staleness_seen: int
    idle_fraction: Mapping[str, float]
    loop_blocked_s: float  # in which workflows blocked the event loop that they share


def living_rows(rows: Iterable[Row]) -> list[Row]:
    """One row a step: after a crash a step is trained again, and its last row is the one that counts."""
    by_step: dict[int, Row] = {}
    for row in rows:
        step = int(row["step"])
        by_step = {earlier: kept for earlier, kept in by_step.items() if earlier < step}
        by_step[step] = row
    return list(by_step.values())


def total(rows: Iterable[Row]) -> Totals:
    """Fold rows into totals. Idle is what a side spent waiting, over the wall time of the same rows."""
    living = living_rows(rows)

    def add(name: str) -> float:
        return sum(float(row.get(name) or 0.0) for row in living)

    wall_s = add("seconds/wall")
    return Totals(
        steps=len(living),
        trained_tokens=int(add("tokens/trained")),
        generated_tokens=int(add("tokens/generated") + add("tokens/generated_before")),
        spanning_fraction=add("rollouts/spanning") / max(1.0, add("rollouts/trained")),
        interrupted_completions=int(add("rollouts/interrupted_completions")),
        max_staleness_seen=max((int(row["staleness/max"]) for row in living), default=0),
        idle_fraction={
            "engine": 1.0 - min(1.0, add("seconds/engine/generating") / wall_s) if wall_s else 0.0,
            "trainer": min(1.0, add("seconds/trainer/waiting_for_rollouts") / wall_s) if wall_s else 0.0,
        },
        loop_blocked_s=add("rollouts/loop_blocked_s"),
    )
