"""benchmarks/soak, small: its fuzzed requests and its agents are answered, nothing is lost while engines are killed and
weights are pushed. A figure that grows is told from one that does not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import LIMITS, MAX_WAITED, MIN_SAMPLES, WAITED, Sample, growth

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_small_soak_finds_nothing(tmp_path: Path) -> None:
    options = ["--minutes", "0.1", "--sessions", "20", "--turns", "4", "--turns-per-s", "20", "--fuzz", "200"]
    command = [sys.executable, "benchmarks/soak", "--out", str(tmp_path / "soak"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 fuzzed requests" in done.stdout
    assert "too short to say" in done.stdout
    assert {"soak.png", "samples.json", "ledger"} <= {one.name for one in (tmp_path / "soak").iterdir()}
    assert len(json.loads((tmp_path / "soak" / "samples.json").read_text())) >= 1


@pytest.mark.parametrize("a_sample_more", [0.0, 1.0])
def test_what_grows_is_told_from_what_is_flat(a_sample_more: float) -> None:
    numbers = range(4 * MIN_SAMPLES)
    figures = [{WAITED: 0.0} | {name: 100 + a_sample_more * 10 * number for name in LIMITS} for number in numbers]
    judged = growth([Sample(float(number), one, {}) for number, one in enumerate(figures)])
    assert list(judged) == list(LIMITS)
    assert all(("GREW" in line) == bool(a_sample_more) for line in judged.values())
    assert growth([Sample(0.0, one, {}) for one in figures[1:]]) == {}
    busy = growth([Sample(0.0, one | {WAITED: 2 * MAX_WAITED}, {}) for one in figures])
    assert "not judged" in busy["p99, ms"]
