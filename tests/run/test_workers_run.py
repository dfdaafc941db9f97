"""The calculator at small size with two rollout workers, by its commands.

1. one of them is killed in the middle: the run completes, says so, and the ledger proves it; 2. it resumes with another
number of workers; 3. when the main process is killed, no process is left (test_quickstart.py has Ctrl-C).
"""

import json
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.commands import run, started, until_step

pytestmark = pytest.mark.slow

SMALL = ["batch_size=4", "group_size=4", "rollout.workers=2"]


@contextmanager
def training(folder: Path, *overrides: str) -> Generator[subprocess.Popen[str]]:
    """The small run, once its second step is done."""
    args = ("areal_agent.train", "--config", "configs/quickstart.yaml", f"run_dir={folder}", *SMALL, *overrides)
    with started(*args) as process:
        until_step(process, folder, 2)
        yield process


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "areal_agent.rollout.worker" in child.cmdline()]


def assert_proved(folder: Path) -> None:
    done = run("areal_agent.ledger", "verify", str(folder))
    assert done.returncode == 0, done.stdout


def test_a_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with training(folder, "steps=8", "eval.num_tasks=8") as process:
        workers = workers_of(process)
        assert len(workers) == 2
        workers[0].kill()
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "was killed by SIGKILL; it is started again" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 8)
    assert {path.name for path in folder.glob("ledger-*.sqlite")} == {"ledger-w0.sqlite", "ledger-w1.sqlite"}
    assert_proved(folder)

    resumed = run("areal_agent.train", "--resume", str(folder), "steps=9", "rollout.workers=0")
    assert resumed.returncode == 0, resumed.stderr
    assert_proved(folder)


def test_no_process_is_left(tmp_path: Path) -> None:
    with training(tmp_path / "run", "steps=100", "eval.num_tasks=0") as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(workers_of(process)) == 2
        process.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=60)[1]
