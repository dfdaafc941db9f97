"""The rows of metrics.jsonl: which kinds there are, and what those of a run add up to. It knows not who writes them.

Names are `group/metric`; times in seconds, counts without a unit. docs/metrics.md explains every name.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from areal_agent.observe.step_view import StepView
from areal_agent.types import RolloutBatch

Row = dict[str, Any]


class RowKind(StrEnum):
    """What a row tells of: its `kind`. All rows have `step`, `incarnation` and `time`."""

    STEP = "step"  # a train step, and where the time since the row before it went
    EVALUATION = "evaluation"  # the result of an evaluation; `step` is the version that served when it began
    TIME = "time"  # where the time went that is of no step: before the first, and after the last


def step_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("kind", RowKind.STEP) == RowKind.STEP]


def evaluation_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("kind") == RowKind.EVALUATION]


def numbers_of(row: Row) -> dict[str, float]:
    """The metrics of a row that are finite numbers, as trackers take them.

    >>> numbers_of({"kind": "step", "step": 3, "reward/mean": 0.5, "trainer/grad_norm": float("nan")})
    {'reward/mean': 0.5}
    """
    numbers = {name: value for name, value in row.items() if "/" in name and isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncounted:
    """The time that no row tells of: between the rows of the last process and the first of this one. Unix seconds."""

    since_s: float = 0.0
    until_s: float = 0.0

    @classmethod
    def between(cls, rows: Iterable[Row], step: int, until_s: float) -> Self:
        """From the end of the row of `step`, where this process goes on; without one, from the beginning of time."""
        ends = (row["time"] for row in step_rows(rows) if row["step"] == step)
        return cls(since_s=max(ends, default=0.0), until_s=until_s)

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
    """What a person sees of a step's row."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Where the time of both sides went: seconds by activity, which add up to `wall_s` on each side."""

    wall_s: float
    engine: Mapping[str, float]
    trainer: Mapping[str, float]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """Of rows of any kind: what is no time is left out."""
        rows = list(rows)
        return cls(
            wall_s=_add(rows, "seconds/wall"),
            engine=_by_activity(rows, "seconds/engine/"),
            trainer=_by_activity(rows, "seconds/trainer/"),
        )

    def share(self, seconds: float) -> float:
        """`seconds` of the wall time, 0 to 1."""
        return min(1.0, seconds / self.wall_s) if self.wall_s > 0 else 0.0


def _by_activity(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
    return {name.removeprefix(prefix): _add(rows, name) for name in names}


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
    num_skipped_updates: int  # of the optimiser, whose gradient was not finite


def living_rows(rows: Iterable[Row]) -> list[Row]:
    """One row a step: after a crash a step is trained again, and its last row is the one that counts."""
    by_step: dict[int, Row] = {}
    for row in step_rows(rows):
        step = int(row["step"])
        by_step = {earlier: kept for earlier, kept in by_step.items() if earlier < step}
        by_step[step] = row
    return list(by_step.values())


def total(rows: Iterable[Row]) -> Totals:
    """Fold rows into totals. Idle is what a side spent waiting, over the wall time of the same rows."""
    living = living_rows(rows)
    spent = Spent.of(living)
    busy_s = spent.engine.get("generating", 0.0) + spent.engine.get("evaluating", 0.0)
    return Totals(
        steps=len(living),
        trained_tokens=int(_add(living, "tokens/trained")),
        generated_tokens=int(_add(living, "tokens/generated") + _add(living, "tokens/generated_before")),
        spanning_fraction=_add(living, "rollouts/spanning") / max(1.0, _add(living, "rollouts/trained")),
        interrupted_completions=int(_add(living, "rollouts/interrupted_completions")),
        max_staleness_seen=max((int(row["staleness/max"]) for row in living), default=0),
        idle_fraction={
            "engine": 1.0 - spent.share(busy_s) if living else 0.0,
            "trainer": spent.share(spent.trainer.get("waiting_for_rollouts", 0.0)),
        },
        loop_blocked_s=_add(living, "rollouts/loop_blocked_s"),
        num_skipped_updates=int(_add(living, "trainer/num_skipped_updates")),
    )


def _add(rows: Iterable[Row], name: str) -> float:
    return sum(float(row.get(name) or 0.0) for row in rows)
