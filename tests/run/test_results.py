"""The lines at the end of a run, summary.json, and the remarks on a run's rows.

- Blocked event loops, skipped updates and mean rewards are reported where they matter, and only there.
- Where the time went, and the advice, are in the lines and in summary.json, with the last evaluations' mean rewards.
- Evaluations beside training are in the curve; success is compared only with what was graded before training.
- What was dropped or masked is in the steps' lines and at the end; the remedy of altered tokens is noted once.
- More than 1% of rollouts that infrastructure failed are noted once.
- The proof of an online run names its gateway's ledger.
- A weight for a part of the reward that no rollout named is reported once; skipped updates at each step.
"""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.files import RunFolder
from areal_agent.observe.metrics import MetricsLog
from areal_agent.observe.progress import Progress
from areal_agent.run.results import Outcome, RunMetrics, RunStatus, closing_lines, write_report
from areal_agent.run.sources import SourceCounts
from areal_agent.trainer.wire import StepReport
from areal_agent.types import Distribution, Rewards, RolloutBatch, WeightVersion
from areal_agent.weights.push import PushReport
from tests.histories import batch_of, completion, record, trajectory, turn
from tests.run.test_evaluation import SlowSource

SUMMARY = {
    "status": "completed",
    "steps": 3,
    "wall_s": 100.0,
    "success_before": None,
    "success_after": None,
    "reward_before": None,
    "reward_after": None,
    "num_eval_tasks": 0,
    "benchmarks": {},
    "trained_tokens": 1000,
    "generated_tokens": 2000,
    "spanning_fraction": 0.5,
    "interrupted_completions": 1,
    "max_staleness_seen": 2,
    "idle_fraction": {"engine": 0.1, "trainer": 0.2},
    "seconds": {"wall": 100.0, "engine": {"generating": 90.0, "other": 10.0}, "trainer": {"training": 100.0}},
    "advice": "neither side waited much for the other",
    "loop_blocked_s": 0.0,
    "num_skipped_updates": 0,
    "altered_tokens": 0,
    "other_roots_tokens": 0,
    "dropped_rollouts": {},
    "checkpoint": None,
    "ledger": "runs/x/ledger.sqlite",
}


GRADED = {"num_eval_tasks": 4, "success_before": 0.25, "success_after": 0.75, "reward_before": 0.25}


@pytest.mark.parametrize(
    ("changes", "is_told", "text"),
    [
        ({"loop_blocked_s": 0.0}, False, "blocked the event loop"),
        ({"loop_blocked_s": 0.9}, False, "blocked the event loop"),
        ({"loop_blocked_s": 12.0}, True, "blocked their shared event loop for 12 s"),
        ({"num_skipped_updates": 0}, False, "left out"),
        ({"num_skipped_updates": 7}, True, "7 optimiser updates were skipped"),
        ({"dropped_rollouts": {"orphan": 4}}, False, "dropped"),
        (
            {"dropped_rollouts": {"stale": 8, "altered": 2}},
            True,
            "dropped 10 rollouts, which taught nothing: 8 stale, 2",
        ),
        ({"dropped_rollouts": {"altered": 2}}, True, "all tokens of 2 dropped rollouts are altered (top_p"),
        ({"altered_tokens": 1200}, True, "1,200 tokens of trained rollouts are altered (top_p"),
        ({"altered_tokens": 1}, True, "rollout.sampling_override=true"),
        ({"other_roots_tokens": 30}, True, "30 tokens are of other conversations than the main one: not trained"),
        ({"ledger": "/gateway/ledger.sqlite"}, True, "verify /gateway/ledger.sqlite"),
        ({}, True, "verify runs/x"),
        (GRADED | {"reward_after": 1.125}, True, "0.250 -> 0.750; mean reward 0.250 -> 1.125"),
        (GRADED | {"reward_after": 0.75}, False, "mean reward"),
        (GRADED, True, "tasks: 0.250 -> 0.750"),
        (GRADED | {"success_before": None}, True, "tasks: 0.750, not graded before training"),
    ],
)
def test_what_matters_is_told(changes: dict[str, object], is_told: bool, text: str) -> None:
    assert (text in closing_lines(RunFolder(Path("runs/x")), SUMMARY | changes)) is is_told


def test_where_the_time_went_is_told() -> None:
    lines = closing_lines(RunFolder(Path("runs/x")), SUMMARY).splitlines()
    assert any(line.split() == ["90%", "generating", "100%", "training"] for line in lines)
    assert "advice: neither side waited much for the other" in lines


def test_the_summary_has_the_mean_rewards_of_the_last_evaluations(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    log = MetricsLog(folder.metrics)
    for label, mean in (("before", 0.25), ("after", 0.5), ("after", 0.625)):
        log.append({"kind": "evaluation", "step": 0, "label": label, "eval/success": 0.0, "eval/reward_mean": mean})
    log.close()
    summary = write_report(folder, Outcome(success_before=0.0, success_after=0.0, num_eval_tasks=4))
    assert (summary["reward_before"], summary["reward_after"]) == (0.25, 0.625)


def write(path: Path, *, with_evaluation: bool) -> dict[str, Any]:
    folder = RunFolder(path)
    folder.make()
    step = {
        "kind": "step",
        "step": 1,
        "staleness/max": 0,
        "staleness/mean": 0.0,
        "reward/mean": 0.5,
        "seconds/wall": 4.0,
    }
    seconds = {"seconds/engine/generating": 4.0, "seconds/trainer/training": 1.0, "seconds/trainer/saving": 3.0}
    rows = [{"kind": "time", "step": 0, "seconds/wall": 2.0, "seconds/trainer/starting": 2.0}, step | seconds]
    rows += [{"kind": "evaluation", "step": 1, "label": "step1", "eval/success": 0.7}] * with_evaluation
    log = MetricsLog(folder.metrics)
    for row in rows:
        log.append(row)
    log.close()
    return write_report(folder, Outcome(status=RunStatus.COMPLETED))


def test_the_summary_has_the_seconds_of_all_rows_and_advice_of_the_steps(tmp_path: Path) -> None:
    summary = write(tmp_path / "run", with_evaluation=False)
    assert summary["seconds"]["trainer"] == {"starting": 2.0, "training": 1.0, "saving": 3.0}
    assert summary["seconds"]["wall"] == 6.0
    assert summary["advice"].startswith("saving took 75% of the time of the steps")


def test_evaluations_beside_training_are_in_the_curve(tmp_path: Path) -> None:
    write(tmp_path / "with", with_evaluation=True)
    write(tmp_path / "without", with_evaluation=False)
    assert (tmp_path / "with" / "curve.png").read_bytes() != (tmp_path / "without" / "curve.png").read_bytes()


@pytest.fixture
def batch() -> RolloutBatch:
    one = replace(trajectory("a", [1], 0.0), rewards=Rewards(final=0.0, parts={"format": 1.0}))
    return batch_of([one], [record("a", [1])])


def told(batch: RolloutBatch, *, part_names: tuple[str, ...] = (), num_skipped: int = 0) -> str:
    """All that is told of two steps."""
    stream = io.StringIO()
    algorithm = AlgorithmConfig(reward_parts=dict.fromkeys(part_names, 1.0))
    metrics = RunMetrics(Progress(total_steps=2, mode="plain", stream=stream), 1.0, algorithm=algorithm)
    for step in (1, 2):
        metrics.trained(batch, StepReport(step=step, metrics={"num_skipped_updates": num_skipped}, seconds=1.0))
    return stream.getvalue()


def test_a_part_that_no_rollout_named_is_told_once(batch: RolloutBatch) -> None:
    text = told(batch, part_names=("fromat", "format"))
    assert text.count("algorithm.reward_parts has fromat, which no rollout") == 1
    assert "they named format" in text


def test_parts_that_were_named_or_computed_are_not_told(batch: RolloutBatch) -> None:
    assert told(batch, part_names=("format", "overlong", "length")) == ""


def test_updates_that_were_left_out_are_told(batch: RolloutBatch) -> None:
    text = told(batch, num_skipped=3)
    assert "step 1: skipped 3 updates" in text
    assert "step 2: skipped 3 updates" in text


class Dropping(SlowSource):
    """Its rollouts are dropped: `drops` since the start."""

    def __init__(self) -> None:
        super().__init__()
        self.drops: dict[str, int] = {}
        self.statuses: dict[str, int] = {}

    def counts(self) -> SourceCounts:
        return SourceCounts(running=0, finished=0, statuses=dict(self.statuses), drops=dict(self.drops))


async def test_drops_and_altered_tokens_are_in_the_steps_line_with_the_remedy_once(tmp_path: Path) -> None:
    answer = completion("a-c", [0, 0], distribution=Distribution.ALTERED)
    one = replace(trajectory("a", [0], 0.0), turns=(turn("exact", completion("a-e", [0])), turn("altered", answer)))
    stream, source = io.StringIO(), Dropping()
    metrics = RunMetrics(Progress(total_steps=2, mode="plain", stream=stream), 1.0)
    metrics.open(tmp_path / "metrics.jsonl")
    await metrics.connect(source, {})
    for step in (1, 2, 3):
        source.drops = {"stale": 5 * step}
        source.statuses = {"completed": 500 - step, "infra": 2 * step + 1}  # above 1% at the third step
        metrics.trained(batch_of([one], [record("a", [0])]), StepReport(step=step, metrics={}, seconds=1.0))
        seconds = dict.fromkeys(("send_s", "pause_s", "transfer_s", "resume_s", "stall_s"), 0.0)
        await metrics.pushed(PushReport(version=WeightVersion(step=step), **seconds), held_s=0.0)
    await metrics.aclose()
    assert stream.getvalue().count("dropped 5 stale; masked 2 tokens altered") == 3
    assert stream.getvalue().count("rollout.sampling_override=true") == 1
    assert stream.getvalue().count("5 of 503 rollouts failed because of a sandbox, an engine or a full disk") == 0
    assert stream.getvalue().count("7 of 504 rollouts failed because of a sandbox, an engine or a full disk") == 1
