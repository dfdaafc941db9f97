"""Another preset lifts the quickstart too, by its name alone: `algorithm=gspo`. The table of all of them is what
benchmarks/quickstart_presets prints.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_gspo_lifts_the_quickstart(tmp_path: Path) -> None:
    overrides = ["algorithm=gspo", "steps=25", "eval.num_tasks=100", f"run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "areal_agent.train", "--config", "configs/quickstart.yaml", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["success_before"] < 0.6
    assert summary["success_after"] > 0.8
