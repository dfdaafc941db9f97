"""metrics.jsonl: its file, its kinds of rows, what a person sees of a row, and what the rows of a run add up to.

The file has one JSON object per line, appended and flushed. A process that dies while it writes leaves a torn last
line: readers skip it, and the next writer removes it. Names are `group/metric`; times in seconds, counts without a
unit. docs/metrics.md explains every name.
"""

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import orjson

from areal_agent.errors import ArealAgentError
from areal_agent.types import RolloutBatch


class MetricsLog:
    """The file, open for appending. Numbers that are not finite are written as null. End it with `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        _remove_torn_line(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is in the file when this returns. Numbers may be numpy's.

        Raises ArealAgentError when it cannot be written whole; the file is then as before.
        """
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        line = memoryview(orjson.dumps(dict(row), option=options))
        before = self._file.seek(0, os.SEEK_END)
        try:
            while line:  # a nearly full disk may write only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise ArealAgentError(
                f"{self._file.name} could not be written: {error.strerror}; make room on its disk and resume the run"
            ) from error

    def close(self) -> None:
        """Close the file. Harmless when closed before."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all rows in order, without a torn last line. Raises ArealAgentError for an earlier broken line."""
    *lines, _torn = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            raise ArealAgentError(f"{path}, line {number} is not JSON: {line[:80]!r}; remove that line") from None
    return rows


def _remove_torn_line(path: Path) -> None:
    """Cut off everything after the last line break."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """The figures of one train step for a person. `engine` and `trainer` are shares of the step's time by activity.

    Activities that begin with `waiting_for_` or `paused_for_` are waiting.

    >>> biggest_wait({"generating": 0.7, "waiting_for_agents": 0.2, "paused_for_push": 0.1})
    ('agents', 0.2)
    """

    step: int
    reward: float
    success: float  # of the trained rollouts, 0 to 1
    generated_tokens_per_s: float
    trained_tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    engine: Mapping[str, float]
    trainer: Mapping[str, float]


WAITING = ("waiting_for_", "paused_for_")
LEAST_SHARE = 0.005
"""The smallest share that is shown: less would be written as 0%."""


def biggest_wait(shares: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the activity that a side waited for most, and its share; None when it did not wait."""
    waits = {words(name, WAITING): share for name, share in shares.items() if name.startswith(WAITING)}
    if max(waits.values(), default=0.0) < LEAST_SHARE:
        return None
    return max(waits.items(), key=lambda wait: wait[1])


def words(activity: str, without: tuple[str, ...] = ()) -> str:
    """Return `waiting_for_agents` as a person writes it, without a prefix that is in `without`."""
    for prefix in without:
        activity = activity.removeprefix(prefix)
    return activity.replace("_", " ")


def clock_time(seconds: float) -> str:
    """Return seconds as a clock shows them.

    >>> clock_time(75.4), clock_time(3725)
    ('1:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TimeLeft:
    """Estimates the time left from the median of the last steps, so that one slow step has little effect."""

    WINDOW = 10

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._durations_s: list[float] = []
        self._since_s: float | None = None

    def start(self, now_s: float) -> None:
        """Note that the next step begins now."""
        self._since_s = now_s

    def step(self, step: int, now_s: float) -> float | None:
        """Note that `step` is done; return the seconds left after it, or None while no step's duration is known."""
        if self._since_s is not None:
            self._durations_s = [*self._durations_s, now_s - self._since_s][-self.WINDOW :]
        self._since_s = now_s
        if not self._durations_s:
            return None
        return statistics.median(self._durations_s) * max(0, self._total_steps - step)


Row = dict[str, Any]


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


def view_of(row: Row) -> StepView:
    """Return the figures of a step's row that a person sees."""
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


def _by_activity(rows: Sequence[Row], prefix: str) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
    return {name.removeprefix(prefix): _add(rows, name) for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The figures of summary.json: the rows of the current lineage, added up."""

    steps: int
    trained_tokens: int
    generated_tokens: int  # in the time of the rows, and those sampled before it that they trained
    spanning_fraction: float
    interrupted_completions: int
    max_staleness_seen: int
    idle_fraction: Mapping[str, float]
    loop_blocked_s: float  # in which workflows blocked their shared event loop
    num_skipped_updates: int  # updates whose gradient was not finite


def living_rows(rows: Iterable[Row]) -> list[Row]:
    """Return one row per step: after a crash a step is trained again, and its last row counts."""
    by_step: dict[int, Row] = {}
    for row in step_rows(rows):
        step = int(row["step"])
        by_step = {earlier: kept for earlier, kept in by_step.items() if earlier < step}
        by_step[step] = row
    return list(by_step.values())


def total(rows: Iterable[Row]) -> Totals:
    """Add rows up. The idle fraction is the time that a side spent waiting, over the wall time of the same rows."""
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
