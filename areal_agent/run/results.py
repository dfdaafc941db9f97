"""The results of a run: metrics.jsonl while it goes on; summary.json and curve.png, made from it, at its end.

metrics.jsonl has a row per step, a row per evaluation, and rows for time outside of steps::

    trainer side: the activities that the run names ─┐
    engine side:  clocks of engine, gateway, runner ─┴─▶ rows ─▶ metrics.jsonl, trackers, progress

Both sides partition the same wall time, from the making of `RunMetrics` to the last row: in every row the seconds of a
side's activities add up to `seconds/wall`.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import reward_parts
from areal_agent.errors import unwritable
from areal_agent.files import RunFolder
from areal_agent.observe.clock import BusyClock, EngineReading, TimeAccount, engine_seconds
from areal_agent.observe.curve import draw_curve
from areal_agent.observe.metrics import (
    DROPPED,
    MASKED,
    MetricsLog,
    Row,
    RowKind,
    Spent,
    Uncounted,
    describe_batch,
    dropped_rollouts,
    evaluation_rows,
    living_rows,
    numbers_of,
    read_metrics,
    total,
)
from areal_agent.observe.progress import Progress, StepView, advice, time_table
from areal_agent.observe.trackers import Trackers
from areal_agent.process import peak_memory_bytes, time_of_day_s
from areal_agent.rollout.config import ALTERED
from areal_agent.run.serving import EvalAnswer, EvalReport
from areal_agent.run.sources import Source
from areal_agent.tokens.loss_rule import LossRule, Mask
from areal_agent.trainer.wire import StepReport
from areal_agent.types import Drop, RolloutBatch, Status, WeightVersion
from areal_agent.weights.push import PushReport

WORTH_TELLING = 0.01
"""The share of a run's time from which blocked event loops get a line of their own at its end."""
MAX_INFRA_SHARE = 0.01
"""The share of rollouts that infrastructure may fail before a run warns."""
STATUSES = "statuses/"
"""With a status: the number of rollouts that ended so since the run, or its resumption, began."""


class RunStatus(StrEnum):
    """The way a run ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The end of a run as far as it is known: what summary.json has beside the figures of metrics.jsonl.

    `success_*` are shares, 0 to 1.
    """

    status: RunStatus = RunStatus.FAILED
    success_before: float | None = None
    success_after: float | None = None
    num_eval_tasks: int = 0
    benchmarks_before: Mapping[str, float] = field(default_factory=dict[str, float])  # successes by name
    benchmarks_after: Mapping[str, float] = field(default_factory=dict[str, float])
    checkpoint: Path | None = None
    tokens: tuple[int, int] | None = None  # sampled and trained, by the ledger; None: not known
    ledger: str | None = None  # of the gateway elsewhere that has the rollouts; None: they are in the run's own
    is_online: bool = False  # agents and engine are elsewhere
    engine_threads: int = 1  # threads of an engine that the run starts itself
    error: str | None = None
    earlier_wall_s: float = 0.0  # of the incarnations before this one
    started_s: float = field(default_factory=time.monotonic)

    @property
    def wall_s(self) -> float:
        """The time until now, with model building, evaluation and earlier incarnations."""
        return self.earlier_wall_s + time.monotonic() - self.started_s


def write_report(folder: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Write summary.json and, once there is a step, curve.png. Return the summary. Raises as `unwritable` does."""
    all_rows = read_metrics(folder.metrics)
    rows, spent = living_rows(all_rows), Spent.of(all_rows)
    evaluations = evaluation_rows(all_rows)
    rewards = {row["label"]: row.get("eval/reward_mean") for row in evaluations}  # the last row of each label
    summary: dict[str, Any] = {
        "status": outcome.status.value,
        "wall_s": round(outcome.wall_s, 2),
        "success_before": outcome.success_before,
        "success_after": outcome.success_after,
        "reward_before": None if outcome.success_before is None else rewards.get("before"),
        "reward_after": None if outcome.success_after is None else rewards.get("after"),
        "num_eval_tasks": outcome.num_eval_tasks,
        "benchmarks": {
            name: {"before": outcome.benchmarks_before.get(name), "after": outcome.benchmarks_after.get(name)}
            for name in {**outcome.benchmarks_before, **outcome.benchmarks_after}
        },
        **total(rows),
        "dropped_rollouts": dropped_rollouts(all_rows),
        "seconds": {
            "wall": round(spent.wall_s, 2),
            "engine": {activity: round(seconds, 2) for activity, seconds in spent.engine.items()},
            "trainer": {activity: round(seconds, 2) for activity, seconds in spent.trainer.items()},
        },
        "advice": advice(
            Spent.of(rows),
            engine_threads=outcome.engine_threads,
            is_online=outcome.is_online,
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
        ),
        "checkpoint": None if outcome.checkpoint is None else str(outcome.checkpoint),
        "ledger": outcome.ledger or str(folder.ledger),
    }
    if outcome.tokens is not None:
        summary["generated_tokens"], summary["trained_tokens"] = outcome.tokens
    if outcome.error is not None:
        summary["error"] = outcome.error
    between = [
        (row["step"], row["eval/success"])
        for row in evaluations
        if row["label"] not in ("before", "after") and "eval/success" in row
    ]
    try:
        folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        if rows:
            draw_curve(
                rows,
                folder.curve,
                success_before=outcome.success_before,
                success_after=outcome.success_after,
                success_between=between,
            )
    except OSError as error:
        raise unwritable(folder.summary, error) from error
    return summary


def _rewards(summary: dict[str, Any]) -> str:
    """Return the mean rewards before and after, or nothing where they equal the success: rewards of only 0 and 1."""
    before, after = summary["reward_before"], summary["reward_after"]
    if before is None or after is None or (before, after) == (summary["success_before"], summary["success_after"]):
        return ""
    return f"; mean reward {before:.3f} -> {after:.3f}"


def closing_lines(folder: RunFolder, summary: dict[str, Any]) -> str:
    """Return the last lines for the terminal: the result, where it lies, and how to go on."""
    lines = [f"{summary['status']} after {summary['steps']} steps in {summary['wall_s']:.0f} s"]
    held_out = {"before": summary["success_before"], "after": summary["success_after"]}
    graded = {f"{summary['num_eval_tasks']} held-out tasks": held_out, **summary["benchmarks"]}
    for name, one in graded.items():
        before, after = one["before"], one["after"]
        if after is not None:
            compared = f"{after:.3f}, not graded before training" if before is None else f"{before:.3f} -> {after:.3f}"
            lines.append(f"success on {name}: {compared}{_rewards(summary) if one is held_out else ''}")
    lines.append(
        f"trained {summary['trained_tokens']:,} of {summary['generated_tokens']:,} generated tokens; "
        f"{summary['spanning_fraction']:.0%} of the trajectories span weight versions, "
        f"{summary['interrupted_completions']} completions were interrupted; "
        f"staleness at most {summary['max_staleness_seen']}"
    )
    lines += _untrained(summary)
    seconds = summary["seconds"]
    lines.append(time_table(Spent(wall_s=seconds["wall"], engine=seconds["engine"], trainer=seconds["trainer"])))
    if summary["advice"]:
        lines.append(f"advice: {summary['advice']}")
    if summary["loop_blocked_s"] > WORTH_TELLING * summary["wall_s"]:
        lines.append(
            f"workflows blocked their shared event loop for {summary['loop_blocked_s']:.0f} s; "
            f"the warnings in {folder.logs} name the lines"
        )
    if summary["num_skipped_updates"]:
        lines.append(
            f"{summary['num_skipped_updates']} optimiser updates were skipped because their gradient was not finite: "
            "their rollouts taught nothing; trainer/num_skipped_updates in metrics.jsonl names the steps"
        )
    lines.append(f"in {folder.path}: summary.json, curve.png, metrics.jsonl, checkpoint {summary['checkpoint']}")
    if summary["status"] != RunStatus.COMPLETED:
        lines.append(f"go on with: python -m areal_agent.train --resume {folder.path}")
    else:
        is_elsewhere = summary["ledger"] != str(folder.ledger)
        lines.append(
            f"proof, on the gateway's machine: python -m areal_agent.ledger verify {summary['ledger']}"
            if is_elsewhere
            else f"proof: python -m areal_agent.ledger verify {folder.path}"
        )
    return "\n".join(lines)


def _untrained(summary: dict[str, Any]) -> Generator[str]:
    """Yield a line for each kind of loss: what was dropped, altered, or of another conversation."""
    dropped = {reason: count for reason, count in summary["dropped_rollouts"].items() if reason != Drop.ORPHAN}
    if dropped:  # orphans are those that the end of the run cut off
        named = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        yield f"dropped {sum(dropped.values()):,} rollouts, which taught nothing: {named}"
    if dropped.get(Drop.ALTERED):
        yield f"all tokens of {dropped[Drop.ALTERED]:,} dropped rollouts are {ALTERED}"
    if summary["altered_tokens"]:
        yield f"{summary['altered_tokens']:,} tokens of trained rollouts are {ALTERED}"
    if summary["other_roots_tokens"]:
        yield f"{summary['other_roots_tokens']:,} tokens are of other conversations than the main one: not trained"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Counters since the start of the run, read at one moment, and gauges of that moment."""

    engine: EngineReading
    trainer: Mapping[str, float]  # seconds by activity
    counts: Mapping[str, float]
    request_s: float  # the times of all engine requests, added up
    gauges: Mapping[str, float]


class RunMetrics:
    """Writes the rows of metrics.jsonl.

    It is made with the run, so that no second is missed, opened once there is a folder, and connected once there is an
    engine.
    """

    def __init__(
        self,
        progress: Progress,
        success_reward: float,
        source_names: Mapping[str, str] | None = None,
        *,
        algorithm: AlgorithmConfig | None = None,
        rule: LossRule | None = None,
    ) -> None:
        self._progress = progress
        self._success_reward = success_reward
        self._source_names = source_names or {}  # task source by task id
        self._algorithm = algorithm or AlgorithmConfig()
        self._expected_parts = frozenset(self._algorithm.reward_parts)  # checked and emptied at the first step
        self._rule = rule or LossRule()
        self._has_noted_altered = False
        self._has_noted_infra = False
        self._account = TimeAccount()
        self._producing = BusyClock()
        self._starting_s = 0.0
        self._paused_s = 0.0
        self._evaluated_tokens = 0
        self._failed_saves = 0
        self._row: Row = {}
        self._uncounted = Uncounted()

    def open(self, path: Path, trackers: Trackers | None = None) -> None:
        """Append rows to `path`; rows of steps and evaluations also go to `trackers`."""
        self._path = path
        self._log = MetricsLog(path)
        self._trackers = trackers or Trackers()

    async def aclose(self) -> None:
        self._log.close()
        await self._trackers.aclose()

    async def connect(self, source: Source, process_ids: Mapping[str, int]) -> None:
        """Begin to read the counters of `source` and the memory of the run's own processes, given by name."""
        self._source = source
        self._process_ids = {"main": os.getpid(), **process_ids}
        now = await self._read()
        self._starting_s = now.engine.wall_s
        self._last = replace(now, engine=replace(now.engine, wall_s=0.0), trainer={})

    def during(self, activity: str) -> AbstractContextManager[None]:
        """Time an activity of the trainer's side. Of nested activities, the innermost one counts."""
        return self._account.during(activity)

    # ------------------------------------------------------------------ what happened

    async def begin_steps(self, version: WeightVersion) -> None:
        """Begin the rows of steps, as rollouts are wanted from now on. A row for the time before is written first."""
        if self._producing.num_running:
            return
        await self.end_time(version)
        rows = await asyncio.to_thread(read_metrics, self._path)
        self._uncounted = Uncounted.between(rows, version.step, time_of_day_s())
        self._producing.begin()

    def end_steps(self) -> None:
        """Stop counting: no more rollouts are wanted."""
        if self._producing.num_running:
            self._producing.end()

    def trained(self, batch: RolloutBatch, report: StepReport) -> None:
        """Begin the row of a step."""
        parts = [reward_parts(one, self._algorithm) for one in batch.trained]
        self._row = describe_batch(batch, self._success_reward, self._source_names, parts)
        masked = sum((self._rule.masked_tokens(one) for one in batch.trained), Counter[Mask]())
        self._row |= {f"{MASKED}{reason}": number for reason, number in masked.items()}
        self._row["tokens/generated_before"] = self._uncounted.num_tokens(batch)
        self._row |= {f"trainer/{name}": value for name, value in report.metrics.items()}
        if num_skipped := report.metrics.get("num_skipped_updates"):
            self._progress.note(f"step {report.step}: skipped {num_skipped:.0f} updates whose gradient was not finite")
        self._note_missed_parts(batch, {name for one in parts for name in one})

    def _note_missed_parts(self, batch: RolloutBatch, named: set[str]) -> None:
        """Note once, at the first step, which of `algorithm.reward_parts` no rollout named: they add nothing."""
        expected, self._expected_parts = self._expected_parts, frozenset[str]()
        if batch.trained and (missed := expected - named):
            self._progress.note(
                f"algorithm.reward_parts has {', '.join(sorted(missed))}, which no rollout of step {batch.step} named; "
                f"they named {', '.join(sorted(named)) or 'none'}"
            )

    def _note_altered(self, row: Row) -> None:
        """Note once what may be done about altered tokens; the steps' lines count them."""
        if not self._has_noted_altered and (row.get(f"{MASKED}altered") or row.get(f"{DROPPED}altered")):
            self._has_noted_altered = True
            self._progress.note(f"step {row['step']}: tokens that agents asked for are {ALTERED}")

    def _note_infra(self, row: Row) -> None:
        """Note once if sandboxes, engines or disks failed too many rollouts: the others may be a biased sample."""
        num_ended = sum(number for name, number in row.items() if name.startswith(STATUSES))
        num_infra = row.get(f"{STATUSES}{Status.INFRA}", 0)
        if not self._has_noted_infra and num_infra > MAX_INFRA_SHARE * num_ended:
            self._has_noted_infra = True
            self._progress.note(
                f"step {row['step']}: {num_infra:,} of {num_ended:,} rollouts failed because of a sandbox, an engine "
                "or a full disk, not of the model, and are not trained; the run's logs have the reasons"
            )

    async def pushed(self, report: PushReport, *, held_s: float) -> None:
        """Finish the row of a step, write it and show it. The push held the engine for `held_s`.

        A push without a train step writes no row; its time goes to the next one.
        """
        self._paused_s += held_s
        if not self._row:
            return
        self._row |= {f"push/{name}": value for name, value in asdict(report).items() if name.endswith("_s")}
        row = self._head(RowKind.STEP, report.version) | self._row | await self._since_last()
        wall_s = max(row["seconds/wall"], 1e-9)
        row["tokens_per_s/generated"] = row["tokens/generated"] / wall_s
        row["tokens_per_s/trained"] = self._row.get("tokens/trained", 0) / wall_s
        self._row = {}
        self._note_altered(row)
        self._note_infra(row)
        self._log.append(row)
        self._trackers.log(report.version.step, numbers_of(row))
        self._progress.step(StepView.of(row))

    def answered(self, answer: EvalAnswer) -> None:
        """Count the tokens of an evaluation's rollout, which are not for training."""
        self._evaluated_tokens += answer.num_tokens

    def evaluated(self, label: str, version: WeightVersion, report: EvalReport, seconds: float) -> None:
        """Write the row of an evaluation that began under `version`."""
        row = self._head(RowKind.EVALUATION, version) | {"label": label, **report.metrics(), "eval/seconds": seconds}
        self._log.append(row)
        self._trackers.log(version.step, numbers_of(row))

    def save_failed(self) -> None:
        """Count a checkpoint that could not be written."""
        self._failed_saves += 1

    async def end_time(self, version: WeightVersion) -> None:
        """Write a row for the time that belongs to no step, and what was dropped in it."""
        since = await self._since_last()
        kept = {name: value for name, value in since.items() if name.startswith(("seconds/", DROPPED))}
        self._log.append(self._head(RowKind.TIME, version) | kept)

    # ------------------------------------------------------------------ what was counted

    def _head(self, kind: RowKind, version: WeightVersion) -> Row:
        return {"kind": kind.value, "step": version.step, "incarnation": version.incarnation, "time": time_of_day_s()}

    async def _since_last(self) -> Row:
        """Return what both sides did since this was called last, and the gauges of now."""
        last, now = self._last, await self._read()
        self._last = now
        wall_s = now.engine.wall_s - last.engine.wall_s
        return {
            "seconds/wall": wall_s,
            **{f"seconds/trainer/{name}": spent - last.trainer.get(name, 0.0) for name, spent in now.trainer.items()},
            **{f"seconds/engine/{name}": spent for name, spent in engine_seconds(last.engine, now.engine).items()},
            **{name: max(0, count - last.counts.get(name, 0)) for name, count in now.counts.items()},
            "engine/mean_running_requests": max(0.0, now.request_s - last.request_s) / max(wall_s, 1e-9),
            **now.gauges,
        }

    async def _read(self) -> Reading:
        engine = await self._source.engine.stats()
        stats = await self._source.stats()
        gateway, now = stats.gateway, self._source.counts()
        trainer = self._account.seconds()
        return Reading(
            engine=EngineReading(
                wall_s=sum(trainer.values()),
                starting_s=self._starting_s,
                paused_s=self._paused_s,
                busy_s=max(0.0, gateway.engine_busy_s - self._paused_s) if engine.busy_s is None else engine.busy_s,
                in_flight_s=gateway.engine_busy_s,
                rolling_s=stats.rolling_s,
                producing_s=self._producing.busy_s,
                generated_tokens=gateway.generated_tokens,
                evaluated_tokens=self._evaluated_tokens,
            ),
            trainer=trainer,
            request_s=gateway.engine_request_s,
            counts={
                "tokens/generated": gateway.generated_tokens,
                "rollouts/loop_blocked_s": stats.loop_blocked_s,
                "checkpoints/failed": self._failed_saves,
                "gateway/turns": gateway.turns,
                "gateway/forks": sum(gateway.forks.values()),
                "gateway/altered_completions": gateway.altered_completions,
                "gateway/malformed_tool_calls": gateway.malformed_tool_calls,
                "gateway/errors": sum(gateway.errors.values()),
                **{f"{DROPPED}{reason}": number for reason, number in now.drops.items()},
            },
            gauges={
                "rollouts/running": now.running,
                "rollouts/finished_untrained": now.finished,
                "engine/running_requests": engine.num_running,
                "engine/queued_requests": engine.num_queued,
                "engine/servers_serving": engine.num_serving,
                "engine/servers_out": engine.num_out,
                "engine/moved_requests": engine.num_moves,
                **{f"{STATUSES}{status}": number for status, number in now.statuses.items()},
                **{f"drops/{reason}": number for reason, number in now.drops.items()},
                **self._peak_memory(),
            },
        )

    def _peak_memory(self) -> dict[str, Any]:
        process_ids = {**self._process_ids, **self._source.process_ids()}
        marks = {name: peak_memory_bytes(pid) for name, pid in process_ids.items()}
        return {f"memory/{name}_peak_bytes": mark for name, mark in marks.items() if mark is not None}
