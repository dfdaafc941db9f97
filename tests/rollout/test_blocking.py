"""Which line is blamed for a blocked event loop.

1. the innermost line of the workflow, not of a library that it calls; 2. without one, the innermost line of all, and
nobody is accused; 3. a loop that waits for events is not blocked; 4. the program that runs the loop is not blamed;
5. the text names the session, the seconds, the place, its source and the remedy; 6. nobody is accused of a library that
imports its modules on first use.
"""

import asyncio
import selectors
import threading
from asyncio import base_events
from pathlib import Path

from areal_agent.rollout import watchdog
from areal_agent.rollout.watchdog import Blockage, Frame, find_blockage


def frame(file: str, function: str = "f", line: int = 1) -> Frame:
    return Frame(file=file, line=line, function=function)


LOOP = frame(base_events.__file__, "_run_once")
PROGRAM = frame("/home/me/train.py", "main")
AGENT = frame("/home/me/agent.py", "solve", 41)
CALLER = frame("/home/me/agent.py", "outer", 12)
THREADING = frame(threading.__file__, "wait")
INSTALLED = frame("/venv/lib/python3.11/site-packages/requests/api.py", "get")
OURS = frame(watchdog.__file__, "render")
SELECT = frame(selectors.__file__, "select")
HANDLE = frame(asyncio.events.__file__, "_run")


def test_the_innermost_line_of_the_workflow() -> None:
    found = find_blockage([THREADING, INSTALLED, AGENT, CALLER, OURS, HANDLE, LOOP, PROGRAM], "rollout s-1")
    assert found == Blockage(place=AGENT, task="rollout s-1")


def test_without_a_workflow_the_innermost_line() -> None:
    found = find_blockage([THREADING, OURS, HANDLE, LOOP, PROGRAM], None)
    assert found == Blockage(place=THREADING, task=None)
    assert found.describe(1.25).startswith("the event loop has not answered for 1.2 s; it is at")


def test_a_loop_that_waits_for_events_is_not_blocked() -> None:
    assert find_blockage([SELECT, LOOP, PROGRAM], None) is None


def test_a_workflow_that_waits_for_a_program_is() -> None:
    assert find_blockage([SELECT, THREADING, AGENT, HANDLE, LOOP, PROGRAM], "Task-3") is not None


def test_the_program_that_runs_the_loop_is_not_blamed() -> None:
    assert find_blockage([OURS, LOOP, PROGRAM], None).place == OURS


def test_the_text(tmp_path: Path) -> None:
    agent = tmp_path / "my_agent.py"
    agent.write_text("import time\n\nasync def solve(task, rollout):\n    time.sleep(5)\n")
    place = Frame(file=str(agent), line=4, function="solve")
    assert Blockage(place=place, task="rollout s-0003").describe(1.23) == (
        f"rollout s-0003 has blocked the event loop for 1.2 s at {agent}:4 in solve: time.sleep(5); "
        "use await asyncio.sleep, an async client, or await asyncio.to_thread(...)"
    )


def test_a_task_of_the_workflow_is_named_as_such() -> None:
    assert Blockage(place=AGENT, task="Task-17").describe(2).startswith("a workflow (task Task-17) has blocked")


def test_an_import_on_first_use_is_nobodys_fault() -> None:
    importing = frame("<frozen importlib._bootstrap>", "_find_and_load")
    found = find_blockage([THREADING, importing, INSTALLED, AGENT, HANDLE, LOOP, PROGRAM], "rollout s-1")
    assert found == Blockage(place=AGENT, task="rollout s-1", is_importing=True)
    assert found.describe(1.25).startswith("the event loop has not answered for 1.2 s; it is at /home/me/agent.py:41")
