"""Signals while `train` runs: 1. the first cancels the work, once; 2. in the closing phase it is only noted; 3. two
that come at once, as `timeout` sends them to a process and its group, are one.
"""

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from areal_agent.run.loop import Interruption


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
