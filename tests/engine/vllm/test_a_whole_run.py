"""`configs/quickstart_vllm.yaml`, shortened, with a real vLLM server that the run starts: it learns, its ledger is
verified, answers span weight versions, no call fails, and no server is left behind.
"""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal_agent.observe.metrics import read_metrics, step_rows

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True, timeout=1200)


def servers() -> set[int]:
    """The vLLM processes, known by their own names or by our launcher."""
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
        *("steps=14", "eval.num_tasks=100"),
    )
    assert done.returncode == 0, done.stderr
    assert "no answer to" not in done.stdout + done.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 14)
    assert summary["success_after"] >= summary["success_before"] + 0.2  # from a third; in all its 70 steps above 0.9
    assert summary["interrupted_completions"] > 0 and summary["max_staleness_seen"] <= 2
    verified = run("areal_agent.ledger", "verify", str(folder))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert not servers() - before


def test_a_run_whose_server_applies_adapters(vllm_python: str, tmp_path: Path) -> None:
    """Adapters are pushed alone; samples agree with the trainer; a resume goes on with the adapters."""
    folder, before = tmp_path / "run", servers()
    settings = (
        *(f"engine.python={vllm_python}", f"run_dir={folder}", "eval.num_tasks=0", "trainer.checkpoint_every=2"),
        *("trainer.lora.push=adapter", "trainer.learning_rate=1e-2", "trainer.warmup_fraction=0.0"),
        *("batch_size=4", "group_size=4"),
    )
    for steps, more in ((2, ()), (4, ("--resume", str(folder)))):
        done = run(
            "areal_agent.train", *("--config", "configs/quickstart_vllm.yaml", *settings, f"steps={steps}", *more)
        )
        assert done.returncode == 0, done.stderr
        assert "no answer to" not in done.stdout + done.stderr
    rows = step_rows(read_metrics(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["trainer/logp_diff_fresh_max"] < 1e-3 for row in rows)
    verified = run("areal_agent.ledger", "verify", str(folder))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert not servers() - before
