"""Signals while `train` runs, and how a failed run ends.

- The first signal cancels the work, once; in the closing phase it is only noted.
- Two that come at once, as `timeout` sends them to a process and its group, count as one.
- A report that cannot be written is added to the error as a note and does not replace it.
- Where rollouts failed, the logs are named; a resume is offered only after a step, and once the cause is mended.
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_agent.errors import ArealAgentError, RolloutsFailing
from areal_agent.files import RunFolder
from areal_agent.run.loop import Interruption, report_failure
from areal_agent.run.results import Outcome


async def signalled(
    interruption: Interruption, *, is_closing: bool = False, signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> list[str]:
    """What happened to a task that sends itself signals."""
    events: list[str] = []

    async def work() -> int:
        task = asyncio.current_task()
        assert task is not None
        with interruption.cancels(task):
            if is_closing:
                interruption.close()
            for number in signals:
                os.kill(os.getpid(), number)
            try:
                while not interruption.happened:  # noqa: ASYNC110 (a signal has no event of its own)
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                events.append("cancelled")
                task.uncancel()
        events.append("done")
        return 0

    await asyncio.create_task(work())
    return events


@pytest.mark.parametrize(
    ("is_closing", "events", "num_notes"), [(False, ["cancelled", "done"], 0), (True, ["done"], 1)]
)
async def test_the_first_signal(is_closing: bool, events: list[str], num_notes: int) -> None:
    notes: list[str] = []
    interruption = Interruption(notes.append)
    assert await signalled(interruption, is_closing=is_closing) == events
    assert interruption.happened
    assert len(notes) == num_notes


async def test_two_signals_at_once_are_one() -> None:
    notes: list[str] = []
    both = (signal.SIGTERM, signal.SIGINT)
    assert await signalled(Interruption(notes.append), signals=both) == ["cancelled", "done"]
    assert notes == []


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    folder.summary.mkdir()  # no file can be written there
    error = ArealAgentError("the disk is full")
    report_failure(folder, Outcome(), error, num_steps=3)
    report, hint = error.__notes__
    assert "report could not be written" in report
    assert hint == f"go on with: python -m areal_agent.train --resume {tmp_path}"


@pytest.mark.parametrize(("num_steps", "is_offered"), [(0, False), (3, True)])
def test_a_resume_is_offered_where_it_helps(tmp_path: Path, num_steps: int, is_offered: bool) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    error = RolloutsFailing("8 groups in a row failed")
    report_failure(folder, Outcome(), error, num_steps)
    logs, *hints = error.__notes__
    assert str(folder.logs) in logs
    assert [hint.startswith("go on with: once the cause is mended, ") for hint in hints] == [True] * is_offered
