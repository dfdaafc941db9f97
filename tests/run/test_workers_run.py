"""The calculator at small size with two rollout workers, by its commands.

1. one of them is killed in the middle: the run completes, says so, and the ledger proves it; 2. it resumes with another
number of workers (test_benchmarks.py: with none); 3. when the main process is then killed, no process is left, and the
ledger proves it (test_quickstart.py has Ctrl-C).
"""

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from areal_agent.ledger.verify import verify
from tests.commands import started, until_step

pytestmark = pytest.mark.slow


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "areal_agent.rollout.worker" in child.cmdline()]


def test_a_worker_or_the_main_process_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = ("areal_agent.train", "--config", "configs/quickstart.yaml", f"run_dir={folder}")
    small = ("batch_size=4", "group_size=4", "rollout.workers=2")
    with started(*config, *small, "steps=8", "eval.num_tasks=8") as process:
        until_step(process, folder, 2)
        workers = workers_of(process)
        assert len(workers) == 2
        workers[0].kill()
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "was killed by SIGKILL; it is started again" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 8)
    assert {path.name for path in folder.glob("ledger-*.sqlite")} == {"ledger-w0.sqlite", "ledger-w1.sqlite"}
    assert verify(folder / "ledger.sqlite").is_ok

    with started("areal_agent.train", "--resume", str(folder), "steps=100", "rollout.workers=1") as process:
        until_step(process, folder, 10)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(workers_of(process)) == 1
        process.kill()
        process.wait()
        assert not psutil.wait_procs(children, timeout=60)[1]
    assert verify(folder / "ledger.sqlite").is_ok
