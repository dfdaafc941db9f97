"""The clock of a thread: 1. what it waited for a core is not in it; 2. where nobody tells, it goes as time does."""

import time
from pathlib import Path

from areal_agent.rollout.watchdog import clock_of_thread


def test_waiting_for_a_core_is_no_time(tmp_path: Path) -> None:
    schedstat = tmp_path / "7" / "schedstat"
    schedstat.parent.mkdir()
    schedstat.write_text("5000 0 3\n")
    now = clock_of_thread(7, tmp_path)
    before_s = now()
    schedstat.write_text("5000 3600000000000 4\n")  # an hour in the queue
    assert -3600 <= now() - before_s < -3500


def test_without_a_file_it_is_time(tmp_path: Path) -> None:
    now = clock_of_thread(7, tmp_path)
    assert time.monotonic() <= now() <= time.monotonic()
