"""The watchdog, with a scripted clock, loop and stack, and once for real.

1. a late answer is looked into once, warned of and counted; 2. an answer in time is not; 3. one warning a place;
4. a loop that is late but not stuck is neither warned of nor counted; 5. a loop that never answers is named;
6. in a real process the blocking line is found, with its session.
"""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_agent.rollout.watchdog import Blockage, Frame, Watchdog


class Scene:
    """A loop that answers when told to, and a clock that goes when told to."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.stuck_at: int | None = 41
        self.pings: list[Callable[[], None]] = []
        self.watchdog = Watchdog(warn_s=1.0, ping=self.pings.append, look=self._look, now=lambda: self.time_s)

    def _look(self) -> Blockage | None:
        if self.stuck_at is None:
            return None
        return Blockage(place=Frame(file="agent.py", line=self.stuck_at, function="solve"), task="rollout s-1")

    def block(self, seconds: float, looks: int = 8) -> None:
        """The loop answers `seconds` after it was asked; the thread looks meanwhile."""
        self.watchdog.check()
        for _ in range(looks):
            self.time_s += seconds / looks
            self.watchdog.check()
        self.pings.pop()()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_late_answer_is_warned_of_once_and_counted(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.block(4.0)
    assert scene.watchdog.blocked_s == 4.0
    assert [record.message[:53] for record in caplog.records] == [
        "rollout s-1 has blocked the event loop for 1.0 s at a"
    ]


def test_an_answer_in_time_is_not(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.block(0.9)
    assert (scene.watchdog.blocked_s, caplog.records) == (0.0, [])


def test_one_warning_a_place(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.block(2.0)
    scene.block(2.0)
    scene.stuck_at = 77
    scene.block(2.0)
    assert scene.watchdog.blocked_s == 6.0
    assert [("agent.py:41" in one.message, "agent.py:77" in one.message) for one in caplog.records] == [
        (True, False),
        (False, True),
    ]


def test_a_loop_that_is_late_but_not_stuck(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.stuck_at = None
    scene.block(3.0)
    assert (scene.watchdog.blocked_s, caplog.records) == (0.0, [])


def test_a_loop_that_never_answers_is_named(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.watchdog.check()
    scene.time_s += 60.0
    scene.watchdog.check()
    assert caplog.records[0].levelno == logging.WARNING


PROGRAM = """
import asyncio, logging, threading
from areal_agent.rollout.watchdog import Watchdog

warned = threading.Event()

class Told(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        warned.set()

async def solve():
    warned.wait()

async def main():
    logging.getLogger().addHandler(Told())
    with Watchdog.of_this_loop(warn_s=0.05) as watchdog:
        await asyncio.create_task(solve(), name="rollout s-0003")
        while not watchdog.blocked_s:
            await asyncio.sleep(0)
    print("counted")

asyncio.run(main())
"""


def test_a_real_loop(tmp_path: Path) -> None:
    program = tmp_path / "my_agent.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    warning, counted = done.stdout.splitlines()
    assert warning.startswith("rollout s-0003 has blocked the event loop for")
    assert f"{program}:13 in solve: warned.wait()" in warning
    assert counted == "counted"
