"""A trainer that is killed at one commit point after another, and restarted each time, trains every trajectory of its
checkpoint exactly once, and no other. Real processes run the ledger's own code; that nothing which was acknowledged is
lost is shown by tests/gateway/test_kill_storm.py.
"""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agent.ledger.verify import verify

ROOT = Path(__file__).parents[2]
NUM_STEPS = 5


def train(path: Path, point: int) -> int:
    """Run a worker to its death at that commit point; return its exit code."""
    command = [sys.executable, "-m", "tests.ledger.worker", path, str(point), str(NUM_STEPS)]
    return subprocess.run(command, cwd=ROOT).returncode


def ids(path: Path, query: str) -> set[str]:
    connection = sqlite3.connect(path)
    try:
        return {id for (id,) in connection.execute(query)}
    finally:
        connection.close()


# One cycle of the worker has at most 7 points: these visit each, in the first step and across restarts.
@pytest.mark.parametrize(
    "points",
    [
        pytest.param(range(1, 8), id="early", marks=pytest.mark.slow),
        pytest.param(range(8, 14), id="late", marks=pytest.mark.slow),
        pytest.param([14, 3, 9, 6, 11, 2], id="mixed"),
    ],
)
def test_every_trajectory_is_trained_once_however_the_trainer_dies(path: Path, points) -> None:
    for point in points:
        train(path, point)
        assert verify(path).violations == ()
    assert train(path, 0) == 0
    assert verify(path).violations == ()
    step, lineage = json.loads(path.with_name("checkpoint.json").read_text())
    trained = ids(path, "SELECT session FROM fates WHERE trained_step IS NOT NULL")
    assert step == NUM_STEPS
    assert len(lineage) == len(set(lineage))
    assert trained == set(lineage)
