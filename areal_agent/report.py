"""What a run leaves for a person: summary.json and curve.png, made from metrics.jsonl. It starts nothing."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from areal_agent.observe.curve import draw_curve
from areal_agent.observe.metrics import read_metrics
from areal_agent.observe.rows import Spent, evaluation_rows, living_rows, total
from areal_agent.observe.time_table import advice, time_table
from areal_agent.run_folder import RunFolder

WORTH_TELLING = 0.01
"""The share of a run's time from which blocked event loops have a line of their own at its end."""


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What summary.json holds beside the figures that follow from metrics.jsonl. `success_*` are shares, 0 to 1."""

    status: RunStatus
    wall_s: float  # model building, evaluation and earlier incarnations included
    success_before: float | None
    success_after: float | None
    num_eval_tasks: int
    checkpoint: Path | None
    tokens: tuple[int, int] | None = None  # sampled and trained, by the ledger; None: it could not be asked
    engine_threads: int = 1  # of an engine that the run starts here
    error: str | None = None


def write_report(folder: RunFolder, facts: RunFacts) -> dict[str, Any]:
    """Write summary.json and, once there is a step, curve.png; returns the summary."""
    all_rows = read_metrics(folder.metrics)
    rows = living_rows(all_rows)
    totals, spent = total(rows), Spent.of(all_rows)
    evaluations = evaluation_rows(all_rows)
    rewards = {row["label"]: row.get("eval/reward_mean") for row in evaluations}  # of a label the last
    sampled_tokens, trained_tokens = facts.tokens or (totals.generated_tokens, totals.trained_tokens)
    summary: dict[str, Any] = {
        "status": facts.status.value,
        "steps": totals.steps,
        "wall_s": round(facts.wall_s, 2),
        "success_before": facts.success_before,
        "success_after": facts.success_after,
        "reward_before": None if facts.success_before is None else rewards.get("before"),
        "reward_after": None if facts.success_after is None else rewards.get("after"),
        "num_eval_tasks": facts.num_eval_tasks,
        "trained_tokens": trained_tokens,
        "generated_tokens": sampled_tokens,
        "spanning_fraction": round(totals.spanning_fraction, 4),
        "interrupted_completions": totals.interrupted_completions,
        "max_staleness_seen": totals.max_staleness_seen,
        "idle_fraction": {side: round(share, 4) for side, share in totals.idle_fraction.items()},
        "seconds": {
            "wall": round(spent.wall_s, 2),
            "engine": {activity: round(seconds, 2) for activity, seconds in spent.engine.items()},
            "trainer": {activity: round(seconds, 2) for activity, seconds in spent.trainer.items()},
        },
        "advice": advice(Spent.of(rows), engine_threads=facts.engine_threads),
        "loop_blocked_s": round(totals.loop_blocked_s, 2),
        "num_skipped_updates": totals.num_skipped_updates,
        "checkpoint": None if facts.checkpoint is None else str(facts.checkpoint),
    }
    if facts.error is not None:
        summary["error"] = facts.error
    folder.summary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if rows:
        between = [row for row in evaluations if row["label"] not in ("before", "after")]
        success = [(row["step"], row["eval/success"]) for row in between]
        draw_curve(
            rows,
            folder.curve,
            success_before=facts.success_before,
            success_after=facts.success_after,
            success_between=success,
        )
    return summary


def _time_lines(summary: dict[str, Any]) -> list[str]:
    """Where the time went, and what to do about it."""
    seconds = summary["seconds"]
    table = time_table(Spent(wall_s=seconds["wall"], engine=seconds["engine"], trainer=seconds["trainer"]))
    return [table, *([f"advice: {summary['advice']}"] if summary["advice"] else [])]


def _rewards(summary: dict[str, Any]) -> str:
    """The mean rewards before and after, where they say more than success does: rewards other than 0 and 1."""
    before, after = summary["reward_before"], summary["reward_after"]
    if before is None or after is None or (before, after) == (summary["success_before"], summary["success_after"]):
        return ""
    return f"; mean reward {before:.3f} -> {after:.3f}"


def closing_lines(folder: RunFolder, summary: dict[str, Any]) -> str:
    """What the terminal shows last: the result, where it lies, and how to go on."""
    lines = [f"{summary['status']} after {summary['steps']} steps in {summary['wall_s']:.0f} s"]
    before, after = summary["success_before"], summary["success_after"]
    if after is not None:
        compared = f"{after:.3f}, not graded before training" if before is None else f"{before:.3f} -> {after:.3f}"
        lines.append(f"success on {summary['num_eval_tasks']} held-out tasks: {compared}{_rewards(summary)}")
    lines.append(
        f"trained {summary['trained_tokens']:,} of {summary['generated_tokens']:,} generated tokens; "
        f"{summary['spanning_fraction']:.0%} of the trajectories span weight versions, "
        f"{summary['interrupted_completions']} completions were interrupted; "
        f"staleness at most {summary['max_staleness_seen']}"
    )
    lines += _time_lines(summary)
    if summary["loop_blocked_s"] > WORTH_TELLING * summary["wall_s"]:
        lines.append(
            f"workflows blocked the event loop that they share for {summary['loop_blocked_s']:.0f} s; "
            f"the warnings in {folder.logs} name the lines"
        )
    if summary["num_skipped_updates"]:
        lines.append(
            f"{summary['num_skipped_updates']} optimiser updates were left out, for their gradient was not finite: "
            "their rollouts taught nothing; trainer/num_skipped_updates in metrics.jsonl says in which steps"
        )
    lines.append(f"in {folder.path}: summary.json, curve.png, metrics.jsonl, checkpoint {summary['checkpoint']}")
    if summary["status"] != RunStatus.COMPLETED:
        lines.append(f"go on with: python -m areal_agent.train --resume {folder.path}")
    else:
        lines.append(f"proof: python -m areal_agent.ledger verify {folder.path}")
    return "\n".join(lines)
