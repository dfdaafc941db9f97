"""The lines at the end of a run: blocked event loops are told when they cost time, and only then."""

from pathlib import Path

import pytest

from areal_agent.report import closing_lines
from areal_agent.run_folder import RunFolder

SUMMARY = {
    "status": "completed",
    "steps": 3,
    "wall_s": 100.0,
    "success_before": None,
    "success_after": None,
    "num_eval_tasks": 0,
    "trained_tokens": 1000,
    "generated_tokens": 2000,
    "spanning_fraction": 0.5,
    "interrupted_completions": 1,
    "max_staleness_seen": 2,
    "idle_fraction": {"engine": 0.1, "trainer": 0.2},
    "loop_blocked_s": 0.0,
    "checkpoint": None,
}


@pytest.mark.parametrize(("blocked_s", "is_told"), [(0.0, False), (0.9, False), (12.0, True)])
def test_blocked_event_loops(blocked_s: float, is_told: bool) -> None:
    text = closing_lines(RunFolder(Path("runs/x")), SUMMARY | {"loop_blocked_s": blocked_s})
    assert ("blocked the event loop that they share for 12 s" in text) is is_told
