"""The watchdog of the event loop.

- A late answer is looked into once, warned of and counted; one in time is not. One warning a place.
- A loop that is late but not stuck is neither warned of nor counted; one that never answers is named.
- In a real process the blocking line is found, with its session.
- Beyond the limit an error is raised there. A workflow that catches it ends its process, as does C code that lets no
  thread run (slow).
- The innermost line of the workflow is blamed, not of a library that it calls; without one, the innermost line of all.
- A loop that waits for events, the program that runs the loop, and an import on first use are not blamed.
- The warning names the session, the seconds, the place, its source and the remedy.
- Time that a thread waited for a core does not count.
"""

import asyncio
import logging
import re
import selectors
import subprocess
import sys
import threading
import time
from asyncio import base_events
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_agent.rollout import watchdog
from areal_agent.rollout.watchdog import Blockage, Frame, Watchdog, clock_of_thread, find_blockage


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


def test_an_answer_in_time_is_not_nor_a_loop_that_is_late_but_not_stuck(scene: Scene, caplog) -> None:
    scene.block(0.9)
    scene.stuck_at = None
    scene.block(3.0)
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
    with Watchdog.of_this_loop(warn_s=0.05, limit_s=60.0) as watchdog:
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


BEYOND_THE_LIMIT = """
import asyncio, itertools, sys, time
from areal_agent.errors import LoopBlocked
from areal_agent.rollout.watchdog import Watchdog

async def sleep():
    time.sleep(600)

async def catch():
    while True:
        try:
            time.sleep(600)
        except LoopBlocked:
            print("caught", flush=True)

async def hold():
    sum(itertools.repeat(1))

async def main(solve):
    with Watchdog.of_this_loop(warn_s=0.1, limit_s=0.5):
        await asyncio.create_task(solve(), name="rollout s-0003")

asyncio.run(main(globals()[sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("solve", "printed", "told"),
    [
        ("sleep", "", "LoopBlocked: rollout s-0003 has blocked the event loop for .* at .*:7 in sleep: .*; use await"),
        ("catch", "caught\n" * 3, "rollout s-0003 has blocked .*:12 in catch: .* so this process ends: .* --resume"),
        pytest.param("hold", "", "agent.py., line 17 in hold", marks=pytest.mark.slow),
    ],
)
def test_beyond_the_limit(tmp_path: Path, solve: str, printed: str, told: str) -> None:
    program = tmp_path / "agent.py"
    program.write_text(BEYOND_THE_LIMIT)
    done = subprocess.run([sys.executable, program, solve], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, printed)
    assert re.search(told, done.stderr)


def frame(file: str, function: str = "f", line: int = 1) -> Frame:
    return Frame(file=file, line=line, function=function)


LOOP = frame(base_events.__file__, "_run_once")
MAIN = frame("/home/me/train.py", "main")
AGENT = frame("/home/me/agent.py", "solve", 41)
CALLER = frame("/home/me/agent.py", "outer", 12)
THREADING = frame(threading.__file__, "wait")
INSTALLED = frame("/venv/lib/python3.11/site-packages/requests/api.py", "get")
OURS = frame(watchdog.__file__, "render")
SELECT = frame(selectors.__file__, "select")
HANDLE = frame(asyncio.events.__file__, "_run")


def test_the_innermost_line_of_the_workflow() -> None:
    found = find_blockage([THREADING, INSTALLED, AGENT, CALLER, OURS, HANDLE, LOOP, MAIN], "rollout s-1")
    assert found == Blockage(place=AGENT, task="rollout s-1")


def test_without_a_workflow_the_innermost_line() -> None:
    found = find_blockage([THREADING, OURS, HANDLE, LOOP, MAIN], None)
    assert found == Blockage(place=THREADING, task=None)
    assert found.describe(1.25).startswith("the event loop has not answered for 1.2 s; it is at")


@pytest.mark.parametrize(
    ("stack", "place"),
    [
        ([SELECT, LOOP, MAIN], None),  # a loop that waits for events is not blocked
        ([SELECT, THREADING, AGENT, HANDLE, LOOP, MAIN], AGENT),  # a workflow that waits for a program is
        ([OURS, LOOP, MAIN], OURS),  # the program that runs the loop is not blamed
    ],
)
def test_who_is_to_blame(stack: list[Frame], place: Frame | None) -> None:
    found = find_blockage(stack, "Task-3")
    assert (found.place if found else None) == place


def test_the_text(tmp_path: Path) -> None:
    agent = tmp_path / "my_agent.py"
    agent.write_text("import time\n\nasync def solve(task, rollout):\n    time.sleep(5)\n")
    place = Frame(file=str(agent), line=4, function="solve")
    assert Blockage(place=place, task="rollout s-0003").describe(1.23) == (
        f"rollout s-0003 has blocked the event loop for 1.2 s at {agent}:4 in solve: time.sleep(5); "
        "use await asyncio.sleep, an async client, or await asyncio.to_thread(...)"
    )
    # a task that the workflow started
    assert Blockage(place=AGENT, task="Task-17").describe(2).startswith("a workflow (task Task-17) has blocked")


def test_an_import_on_first_use_is_nobodys_fault() -> None:
    importing = frame("<frozen importlib._bootstrap>", "_find_and_load")
    found = find_blockage([THREADING, importing, INSTALLED, AGENT, HANDLE, LOOP, MAIN], "rollout s-1")
    assert found == Blockage(place=AGENT, task="rollout s-1", is_importing=True)
    assert found.describe(1.25).startswith("the event loop has not answered for 1.2 s; it is at /home/me/agent.py:41")


def test_waiting_for_a_core_is_no_time(tmp_path: Path) -> None:
    schedstat = tmp_path / "7" / "schedstat"
    schedstat.parent.mkdir()
    schedstat.write_text("5000 0 3\n")
    now = clock_of_thread(7, tmp_path)
    before_s = now()
    schedstat.write_text("5000 3600000000000 4\n")  # an hour in the queue
    assert -3600 <= now() - before_s < -3500
    schedstat.unlink()
    assert time.monotonic() <= now() <= time.monotonic()
