"""A SIGKILL loses nothing that was acknowledged. Each test kills real processes that run the ledger's own code.

1. after a kill at a random moment, every acknowledged turn and end is there, the file is intact, and open sessions
end as orphans; 2. a trainer that is killed at one commit point after another, and restarted each time, trains every
trajectory of its checkpoint exactly once, and no other.
"""

import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.verify import verify

ROOT = Path(__file__).parents[2]
NUM_KILLS = 12
NUM_STEPS = 5


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.ledger.worker", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def lines_until_killed(path: Path, name: str, num_lines: int) -> list[str]:
    """Start a worker, kill it after it has kept `num_lines` promises, and return all that it printed."""
    with start("append", path, name) as worker:
        lines = [worker.stdout.readline().strip() for _ in range(num_lines)]
        worker.kill()
        return lines + worker.stdout.read().splitlines()


def ids(path: Path, query: str) -> set[str]:
    connection = sqlite3.connect(path)
    try:
        return {id for (id,) in connection.execute(query)}
    finally:
        connection.close()


async def test_what_was_acknowledged_survives_a_kill(path: Path) -> None:
    moments = random.Random(0)
    acknowledged: set[str] = set()
    for number in range(NUM_KILLS):
        acknowledged.update(lines_until_killed(path, f"life{number}", moments.randint(1, 120)))
        turns = {line.removeprefix("turn ") for line in acknowledged if line.startswith("turn ")}
        closed = {line.removeprefix("closed ") for line in acknowledged if line.startswith("closed ")}
        assert turns <= ids(path, "SELECT id FROM turns")
        assert closed <= ids(path, "SELECT s.id FROM endings e JOIN sessions s ON s.number = e.session")
        assert verify(path).violations == ()
    assert len(acknowledged) > NUM_KILLS
    ledger = await Ledger.open(path, create=False)
    await ledger.begin_incarnation(0)
    counts = await ledger.ask(questions.counts)
    await ledger.aclose()
    assert counts.num_open == 0
    assert counts.drops["orphan"] > 0
    assert verify(path).violations == ()


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
        with start("train", path, point, NUM_STEPS) as worker:
            worker.wait()
        assert verify(path).violations == ()
    with start("train", path, 0, NUM_STEPS) as worker:
        assert worker.wait() == 0
    report = verify(path)
    assert report.violations == ()
    step, lineage = json.loads(path.with_name("checkpoint.json").read_text())
    trained = ids(path, "SELECT session FROM fates WHERE trained_step IS NOT NULL")
    assert step == NUM_STEPS
    assert len(lineage) == len(set(lineage))
    assert trained == set(lineage)
