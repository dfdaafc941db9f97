"""The lines at the end of a run: 1. blocked event loops are told when they cost time, and only then; 2. where the time
went, and the advice, which summary.json has, too; 3. evaluations beside training are in the curve;
4. success is compared only with what was graded before training; 5. updates that were left out are told; 6. mean
rewards are told where they differ from success, and summary.json has those of the last evaluations.
"""

from pathlib import Path
from typing import Any

import pytest

from areal_agent.files import RunFolder
from areal_agent.observe.metrics import MetricsLog
from areal_agent.run.results import RunFacts, RunStatus, closing_lines, write_report

SUMMARY = {
    "status": "completed",
    "steps": 3,
    "wall_s": 100.0,
    "success_before": None,
    "success_after": None,
    "reward_before": None,
    "reward_after": None,
    "num_eval_tasks": 0,
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
    "checkpoint": None,
}


@pytest.mark.parametrize(("blocked_s", "is_told"), [(0.0, False), (0.9, False), (12.0, True)])
def test_blocked_event_loops(blocked_s: float, is_told: bool) -> None:
    text = closing_lines(RunFolder(Path("runs/x")), SUMMARY | {"loop_blocked_s": blocked_s})
    assert ("blocked their shared event loop for 12 s" in text) is is_told


@pytest.mark.parametrize(("num_skipped", "is_told"), [(0, False), (7, True)])
def test_updates_that_were_left_out(num_skipped: int, is_told: bool) -> None:
    text = closing_lines(RunFolder(Path("runs/x")), SUMMARY | {"num_skipped_updates": num_skipped})
    assert ("7 optimiser updates were skipped" in text) is is_told


def test_where_the_time_went_is_told() -> None:
    lines = closing_lines(RunFolder(Path("runs/x")), SUMMARY).splitlines()
    assert any(line.split() == ["90%", "generating", "100%", "training"] for line in lines)
    assert "advice: neither side waited much for the other" in lines


@pytest.mark.parametrize(
    ("before", "told"), [(0.25, "tasks: 0.250 -> 0.750"), (None, "tasks: 0.750, not graded before training")]
)
def test_success_is_told(before: float | None, told: str) -> None:
    graded = {"num_eval_tasks": 4, "success_before": before, "success_after": 0.75}
    assert told in closing_lines(RunFolder(Path("runs/x")), SUMMARY | graded)


@pytest.mark.parametrize(("after", "is_told"), [(1.125, True), (0.75, False)])
def test_mean_rewards_are_told_where_they_differ_from_success(after: float, is_told: bool) -> None:
    graded = {"num_eval_tasks": 4, "success_before": 0.25, "success_after": 0.75}
    rewards = {"reward_before": 0.25, "reward_after": after}
    text = closing_lines(RunFolder(Path("runs/x")), SUMMARY | graded | rewards)
    assert ("0.250 -> 0.750; mean reward 0.250 -> 1.125" in text) is is_told


def test_the_summary_has_the_mean_rewards_of_the_last_evaluations(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    log = MetricsLog(folder.metrics)
    for label, mean in (("before", 0.25), ("after", 0.5), ("after", 0.625)):
        log.append({"kind": "evaluation", "step": 0, "label": label, "eval/success": 0.0, "eval/reward_mean": mean})
    log.close()
    facts = RunFacts(
        status=RunStatus.COMPLETED, wall_s=7.0, success_before=0.0, success_after=0.0, num_eval_tasks=4, checkpoint=None
    )
    summary = write_report(folder, facts)
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
    facts = RunFacts(
        status=RunStatus.COMPLETED,
        wall_s=7.0,
        success_before=None,
        success_after=None,
        num_eval_tasks=0,
        checkpoint=None,
    )
    return write_report(folder, facts)


def test_the_summary_has_the_seconds_of_all_rows_and_advice_of_the_steps(tmp_path: Path) -> None:
    summary = write(tmp_path / "run", with_evaluation=False)
    assert summary["seconds"]["trainer"] == {"starting": 2.0, "training": 1.0, "saving": 3.0}
    assert summary["seconds"]["wall"] == 6.0
    assert summary["advice"].startswith("saving took 75% of the time of the steps")


def test_evaluations_beside_training_are_in_the_curve(tmp_path: Path) -> None:
    write(tmp_path / "with", with_evaluation=True)
    write(tmp_path / "without", with_evaluation=False)
    assert (tmp_path / "with" / "curve.png").read_bytes() != (tmp_path / "without" / "curve.png").read_bytes()
