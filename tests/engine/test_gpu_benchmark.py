"""The GPU benchmark of the engine runs on a CPU, with the same code and a small model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_benchmark_for_gpus_fills_its_tables_on_a_cpu():
    command = [sys.executable, "benchmarks/engine/gpu.py", "--shapes", "tiny", "--device", "cpu"]
    command += ["--rounds", "1", "--pushes", "2", "--requests", "2", "--long", "160"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    assert "| 2 | 128 + 128 |" in done.stdout and "| 2 | 160 + 128 |" in done.stdout
    assert "| shared memory |" in done.stdout
