"""Children of a run:

1. They end with their parent, even one killed by SIGKILL.
2. One that dies by itself is reported with its status and its last log lines.
3. Closing ends one that ignores SIGTERM, also when it is cancelled.
4. A log line has time, level and name; a second process appends; warnings are in it, too, and libraries that log each
   request from WARNING on.
5. Peak memory is at least what a process once held; one that is gone has none.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_agent.process import ManagedProcess, peak_memory_bytes, uninterrupted

CHILD = "from areal_agent.process import exit_with_parent; exit_with_parent(); import time; print('up', flush=True); "


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_children_end_with_a_killed_parent(tmp_path: Path) -> None:
    parent = f"""
import asyncio, sys, time
from pathlib import Path
from areal_agent.process import ManagedProcess

async def main():
    child = await ManagedProcess.start("child", [sys.executable, "-c", {CHILD + "time.sleep(600)"!r}],
                                       log_path=Path({str(tmp_path / "log")!r}))
    print(child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        child_pid = int(process.stdout.readline())
        wait_until(lambda: "up" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(child_pid))


@pytest.mark.parametrize(
    ("end", "told"),
    [("sys.exit(3)", "the worker process exited with 3"), ("os.kill(os.getpid(), 9)", "was killed by SIGKILL")],
)
async def test_a_death_is_told_with_the_last_lines(tmp_path: Path, end: str, told: str) -> None:
    code = f"import os, sys; print('the last words', flush=True); {end}"
    process = await ManagedProcess.start("worker", [sys.executable, "-c", code], log_path=tmp_path / "worker.log")
    error = str(await process.died())
    await process.aclose()
    assert told in error and "the last words" in error


@pytest.mark.parametrize("is_patient", [True, False])
async def test_closing_ends_one_that_ignores_sigterm(tmp_path: Path, is_patient: bool) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    process = await ManagedProcess.start("stubborn", [sys.executable, "-c", code], log_path=tmp_path / "log")
    wait_until(lambda: "up" in (tmp_path / "log").read_text())
    closing = asyncio.create_task(process.aclose(0.1 if is_patient else 600.0))
    if not is_patient:
        await asyncio.sleep(0.1)
        closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled() is not is_patient
    async with asyncio.timeout(20.0):
        assert "was killed by SIGKILL" in str(await process.died())
    await process.aclose()


CODE = """
import logging, sys, warnings
from pathlib import Path
from areal_agent.process import start_logging
start_logging(Path(sys.argv[1]))
logging.getLogger("areal_agent.engine").info("loaded %s", "tiny")
logging.getLogger("httpx").info("HTTP Request: POST")
logging.getLogger("httpx").warning("slow")
warnings.warn("old")
"""


def test_the_log_of_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CODE, str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = path.read_text().splitlines()
    assert lines[0][:2] == "20" and lines[0].endswith("INFO    areal_agent.engine: loaded tiny")
    assert any("py.warnings" in line and "UserWarning: old" in line for line in lines)
    assert any("WARNING httpx: slow" in line for line in lines)
    assert not any("HTTP Request" in line for line in lines), "libraries are heard from WARNING on"
    assert sum("loaded tiny" in line for line in lines) == 2, "the second process appends"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_peak_memory_is_what_was_held_once_and_none_of_a_process_that_is_gone() -> None:
    size = 64 * 2**20
    assert len(bytearray(b"x" * size)) == size  # and it is gone again
    peak = peak_memory_bytes(os.getpid())
    assert peak is not None and peak > size
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert peak_memory_bytes(done.pid) is None


async def test_work_that_must_not_be_cut_ends_however_often_it_is_cancelled() -> None:
    ended: list[bool] = []
    going_on = asyncio.Event()

    async def work() -> None:
        await going_on.wait()
        ended.append(True)

    async def caller() -> None:
        try:
            await uninterrupted(work())
        except asyncio.CancelledError:
            assert ended, "it was told before the work had ended"
            raise

    task = asyncio.create_task(caller())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    going_on.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert ended
