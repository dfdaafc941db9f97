"""How a failed run ends: a report that cannot be written is told beside the error, and does not take its place."""

from pathlib import Path

from areal_agent.errors import ArealAgentError
from areal_agent.files import RunFolder
from areal_agent.run.loop import report_failure
from areal_agent.run.results import RunFacts, RunStatus


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    folder.summary.mkdir()  # no file can be written there
    facts = RunFacts(
        status=RunStatus.FAILED,
        wall_s=1.0,
        success_before=None,
        success_after=None,
        num_eval_tasks=0,
        checkpoint=None,
        tokens=None,
    )
    error = ArealAgentError("the disk is full")
    report_failure(folder, facts, error)
    report, hint = error.__notes__
    assert "report could not be written" in report
    assert hint == f"go on with: python -m areal_agent.train --resume {tmp_path}"
