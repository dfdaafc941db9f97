"""metrics.jsonl: its file, its kinds of rows, the metrics of one batch, and what the rows of a run add up to.

The file has one JSON object per line, appended and flushed. A process that dies while it writes leaves a torn last
line: readers skip it, and the next writer removes it. Names are `group/metric`; times in seconds, counts without a
unit. docs/metrics.md explains every name.
"""

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from areal_agent.errors import ArealAgentError, unwritable
from areal_agent.files import no_device
from areal_agent.types import Completion, FinishReason, RolloutBatch, Trajectory, TrajectoryGroup


class MetricsLog:
    """The file, open for appending. Numbers that are not finite are written as null. End it with `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        _remove_torn_line(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is in the file when this returns. Numbers may be numpy's.

        Raises DiskFull, or ArealAgentError, when it cannot be written whole; the file is then as before.
        """
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        line = memoryview(orjson.dumps(dict(row), option=options))
        before = self._file.seek(0, os.SEEK_END)
        try:
            while line:  # a nearly full disk may write only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        """Close the file. Harmless when closed before."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all rows in order, without a torn last line. Raises ArealAgentError for a broken line, or no file."""
    try:
        *lines, _torn = no_device(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ArealAgentError(f"{path} cannot be read: {error}; put the run's file back") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append({**orjson.loads(line)})
        except (orjson.JSONDecodeError, TypeError):
            raise ArealAgentError(f"{path}, line {number} is not JSON of a row: {line[:80]!r}; remove it") from None
    return rows


def _remove_torn_line(path: Path) -> None:
    """Cut off everything after the last line break."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


Row = dict[str, Any]
Values = Sequence[float]


class RowKind(StrEnum):
    """The `kind` of a row. All rows have `step`, `incarnation` and `time`."""

    STEP = "step"  # a train step, and where the time since the previous row went
    EVALUATION = "evaluation"  # the result of an evaluation; `step` is the version that served when it began
    TIME = "time"  # where time outside of steps went: before the first and after the last


def step_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("kind", RowKind.STEP) == RowKind.STEP]


def evaluation_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.get("kind") == RowKind.EVALUATION]


def numbers_of(row: Row) -> dict[str, float]:
    """Return the metrics of a row that are finite numbers, for trackers.

    >>> numbers_of({"kind": "step", "step": 3, "reward/mean": 0.5, "trainer/grad_norm": float("nan")})
    {'reward/mean': 0.5}
    """
    numbers = {name: value for name, value in row.items() if "/" in name and isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if math.isfinite(value)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncounted:
    """The time that no row covers: between the last row of the last process and the first of this one. Unix seconds."""

    since_s: float = 0.0
    until_s: float = 0.0

    @classmethod
    def between(cls, rows: Iterable[Row], step: int, until_s: float) -> Self:
        """Return the time since the end of the row of `step`, where this process goes on; or since 0 without it."""
        ends = (row["time"] for row in step_rows(rows) if row["step"] == step)
        return cls(since_s=max(ends, default=0.0), until_s=until_s)

    def num_tokens(self, batch: RolloutBatch) -> int:
        """Return the tokens sampled in that time among those a batch trains. Whole turns, by their gateway's clock."""
        turns = (turn for one in batch.trained for turn in one.turns)
        return sum(
            len(completion.token_ids)
            for turn in turns
            if self.since_s < turn.ended_s <= self.until_s
            for completion in turn.completions
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The time of both sides: seconds by activity, which add up to `wall_s` on each side."""

    wall_s: float
    engine: Mapping[str, float]
    trainer: Mapping[str, float]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Self:
        """Add up the times of rows of any kind."""
        rows = list(rows)
        return cls(
            wall_s=_add(rows, "seconds/wall"),
            engine=_by_activity(rows, "seconds/engine/"),
            trainer=_by_activity(rows, "seconds/trainer/"),
        )

    def share(self, seconds: float) -> float:
        """Return the share of `seconds` in the wall time, 0 to 1."""
        return min(1.0, seconds / self.wall_s) if self.wall_s > 0 else 0.0

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the shares of the activities in the wall time: the engine's, and the trainer's."""
        engine = {name: self.share(seconds) for name, seconds in self.engine.items()}
        return engine, {name: self.share(seconds) for name, seconds in self.trainer.items()}


DROPPED = "rollouts/dropped/"
"""With a reason: the number of rollouts dropped since the row before."""

MASKED = "tokens/masked/"
"""With a reason: the number of sampled tokens of trained rollouts that are not in the loss."""


def dropped_rollouts(rows: Iterable[Row]) -> dict[str, int]:
    """Return the number of rollouts dropped in the time of these rows, by reason."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(DROPPED))
    counts = {name.removeprefix(DROPPED): int(_add(rows, name)) for name in names}
    return {reason: count for reason, count in counts.items() if count}


def untrained(row: Row) -> str:
    """Return, for a person, what a step did not train and why; nothing where all was trained.

    >>> untrained({"rollouts/dropped/stale": 8, "rollouts/dropped/error": 0, "tokens/masked/altered": 1200})
    'dropped 8 stale; masked 1,200 tokens altered'
    """
    dropped = [f"{count:,} {reason}" for reason, count in dropped_rollouts([row]).items()]
    masked = [(row.get(f"{MASKED}{reason}"), text) for reason, text in MASKED_FOR.items()]
    tokens = [f"{count:,} tokens {text}" for count, text in masked if count]
    return "; ".join(f"{verb} {', '.join(said)}" for verb, said in (("dropped", dropped), ("masked", tokens)) if said)


MASKED_FOR = {"altered": "altered", "other_roots": "of other conversations"}


def _by_activity(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
    return {name.removeprefix(prefix): _add(rows, name) for name in names}


def living_rows(rows: Iterable[Row]) -> list[Row]:
    """Return one row per step: after a crash a step is trained again, and its last row counts."""
    by_step: dict[int, Row] = {}
    for row in step_rows(rows):
        step = int(row["step"])
        by_step = {earlier: kept for earlier, kept in by_step.items() if earlier < step}
        by_step[step] = row
    return list(by_step.values())


def total(rows: Iterable[Row]) -> dict[str, Any]:
    """Add up the rows of the current lineage, by the names of summary.json.

    `generated_tokens` are those sampled in the time of the rows, and those sampled before it that they trained. The
    idle fraction is the time that a side spent waiting, over the wall time of the same rows.
    """
    living = living_rows(rows)
    spent = Spent.of(living)
    busy_s = spent.engine.get("generating", 0.0) + spent.engine.get("evaluating", 0.0)
    waited_s = spent.trainer.get("waiting_for_rollouts", 0.0)
    return {
        "steps": len(living),
        "trained_tokens": int(_add(living, "tokens/trained")),
        "generated_tokens": int(_add(living, "tokens/generated") + _add(living, "tokens/generated_before")),
        "spanning_fraction": round(_add(living, "rollouts/spanning") / max(1.0, _add(living, "rollouts/trained")), 4),
        "interrupted_completions": int(_add(living, "rollouts/interrupted_completions")),
        "max_staleness_seen": max((int(row["staleness/max"]) for row in living), default=0),
        "idle_fraction": {
            "engine": round(1.0 - spent.share(busy_s), 4) if living else 0.0,
            "trainer": round(spent.share(waited_s), 4),
        },
        "altered_tokens": int(_add(living, f"{MASKED}altered")),
        "other_roots_tokens": int(_add(living, f"{MASKED}other_roots")),
        "loop_blocked_s": round(_add(living, "rollouts/loop_blocked_s"), 2),
        "num_skipped_updates": int(_add(living, "trainer/num_skipped_updates")),
    }


def _add(rows: Iterable[Row], name: str) -> float:
    return sum(float(row.get(name) or 0.0) for row in rows)


def describe_batch(
    batch: RolloutBatch,
    success_reward: float,
    sources: Mapping[str, str] | None = None,
    parts: Iterable[Mapping[str, float]] = (),
) -> Row:
    """Return all metrics of what is trained in one step.

    `sources` maps task ids to the names of their sources; `parts` are the reward parts of the trained trajectories.
    """
    trained = batch.trained
    ids = {one.session_id for one in trained if not one.role}
    own = ([one for one in group.trajectories if one.session_id in ids] for group in batch.groups)
    groups = [group for group in own if group]
    return {
        **_rewards([one for one in trained if not one.role], groups, success_reward),
        **_rewards_by_role(trained),
        **_rewards_by_source(batch.groups, ids, sources or {}),
        **_rollouts(batch),
        **_latencies(trained),
        **_staleness(batch),
        **_tokens(batch),
        **_means("reward/part", parts),
        **_means("logged", [one.logged for one in trained]),
    }


def pass_at(k: int, num_samples: int, num_successes: int) -> float:
    """Return the chance that one of k samples succeeds, estimated without bias from n >= k (Chen et al. 2021, eq. 1).

    pass@k = 1 - C(n - c, k) / C(n, k), with c successes among the n.

    >>> pass_at(2, num_samples=4, num_successes=1)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_successes, k) / math.comb(num_samples, k)


def _rewards(trained: Sequence[Trajectory], groups: Sequence[Sequence[Trajectory]], success_reward: float) -> Row:
    rewards = [one.rewards.total for one in trained]
    spreads = [statistics.pstdev([one.rewards.total for one in group]) for group in groups]
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


def _rewards_by_role(trained: Iterable[Trajectory]) -> Row:
    by_role: dict[str, list[float]] = {}
    for one in trained:
        if one.role:
            by_role.setdefault(one.role, []).append(one.rewards.total)
    return {f"reward/role/{role}/mean": _mean(rewards) for role, rewards in by_role.items()} | {
        f"reward/role/{role}/std": _std(rewards) for role, rewards in by_role.items()
    }


def _rewards_by_source(groups: Iterable[TrajectoryGroup], ids: set[str], sources: Mapping[str, str]) -> Row:
    by_source: dict[str, list[float]] = {}
    for group in groups:
        if (source := sources.get(group.task_id)) is not None:
            rewards = [one.rewards.total for one in group.trajectories if one.session_id in ids]
            if rewards:
                by_source.setdefault(source, []).extend(rewards)
    return {f"reward/mean/{source}": _mean(rewards) for source, rewards in by_source.items()} | {
        f"reward/std/{source}": _std(rewards) for source, rewards in by_source.items()
    }


def _rollouts(batch: RolloutBatch) -> Row:
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


def _latencies(trained: Iterable[Trajectory]) -> Row:
    rollouts = [one.ended_s - one.started_s for one in trained]
    turns = [turn.ended_s - turn.started_s for one in trained for turn in one.turns]
    return {
        "rollouts/seconds": _mean(rollouts),
        "rollouts/seconds_p50": _percentile(rollouts, 50),
        "rollouts/seconds_p95": _percentile(rollouts, 95),
        "turns/seconds_p50": _percentile(turns, 50),
        "turns/seconds_p95": _percentile(turns, 95),
    }


def _staleness(batch: RolloutBatch) -> Row:
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


def _tokens(batch: RolloutBatch) -> Row:
    num_trained = sum(int(record.loss_mask.sum()) for record in batch.records)
    num_sampled = sum(one.num_sampled_tokens for one in batch.trained)
    return {
        "tokens/trained": num_trained,
        "tokens/masked_fraction": 1.0 - num_trained / num_sampled if num_sampled else 0.0,
    }


def _means(prefix: str, named: Iterable[Mapping[str, Any]]) -> Row:
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
