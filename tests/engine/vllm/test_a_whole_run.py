"""`configs/quickstart_vllm.yaml`, shortened, with a real vLLM server that the run starts: it trains, its ledger is
proved, answers span weight versions, no call fails, and no server is left behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=1200)


def servers() -> set[int]:
    """vLLM's processes: they name themselves, or are our launcher."""
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any("VLLM::" in word or "vllm/launcher.py" in word for word in process.info["cmdline"] or ())
    }


def test_a_run_with_a_server_of_its_own(vllm_python: str, tmp_path: Path) -> None:
    folder, before = tmp_path / "run", servers()
    done = run(
        "areal_agent.train",
        *("--config", "configs/quickstart_vllm.yaml", f"engine.python={vllm_python}", f"run_dir={folder}"),
        *("steps=6", "eval.num_tasks=8"),
    )
    assert done.returncode == 0, done.stderr
    assert "no answer to" not in done.stdout + done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 6)
    assert summary["interrupted_completions"] > 0 and summary["max_staleness_seen"] <= 2
    verified = run("areal_agent.ledger", "verify", str(folder))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert servers() == before
