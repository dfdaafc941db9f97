"""The doctor, with a real vLLM server that it starts (slow): all is well, by either way that weights go."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transfer", ["shared_memory", "distributed"])
def test_all_is_well(transfer: str, vllm_python: str, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "areal_agent.doctor", "--config", "configs/quickstart_vllm.yaml")
    changes = (f"engine.python={vllm_python}", f"trainer.transfer={transfer}", f"run_dir={tmp_path / 'run'}")
    done = subprocess.run([*command, *changes], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"by {transfer.replace('_', ' ')}: published in" in done.stdout
