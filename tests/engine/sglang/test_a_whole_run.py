"""`configs/quickstart_sglang.yaml`, shortened, with a real SGLang server that the run starts and sends its weights by
torch.distributed: it learns, its ledger is verified, answers span weight versions, no call fails, and no server is left
behind. test_online.py has a run that pushes through memory.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=1200)


def servers(kind: str) -> set[int]:
    """The processes of SGLang or vLLM, known by their own names or by our launcher."""
    names = {"sglang": "sglang::", "vllm": "VLLM::"}[kind], f"{kind}/launcher.py"
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(name in word for word in process.info["cmdline"] or () for name in names)
    }


def train(kind: str, folder: Path, python: str, *settings: str) -> None:
    """Train in this folder without a failed call, verify the ledger, and leave no server."""
    before = servers(kind)
    place = f"engine.python={python}", f"run_dir={folder}"
    done = run("areal_agent.train", "--config", f"configs/quickstart_{kind}.yaml", *place, *settings)
    assert done.returncode == 0, done.stderr
    assert "no answer to" not in done.stdout + done.stderr
    verified = run("areal_agent.ledger", "verify", str(folder))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert not servers(kind) - before


def trained(kind: str, folder: Path, python: str, *settings: str) -> dict[str, Any]:
    """Train, and return the run's report at its end."""
    train(kind, folder, python, *settings)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["interrupted_completions"] > 0 and summary["max_staleness_seen"] <= 2
    return summary


def test_a_run_with_a_server_of_its_own_learns(sglang_python: str, tmp_path: Path) -> None:
    """The reward starts at a third; the full 70 steps reach 0.9."""
    settings = ("steps=14", "eval.num_tasks=100", "trainer.transfer=distributed")
    summary = trained("sglang", tmp_path / "run", sglang_python, *settings)
    assert summary["success_after"] >= summary["success_before"] + 0.2
