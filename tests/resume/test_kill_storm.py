"""A run whose process is killed again and again, and started again each time: the commit code itself, without torch.

1. killed for real at every named commit point, once each: the ledger is proved after each death, and in the end each
rollout that ended is trained exactly once in the lineage that lives, which is what the last checkpoint was trained on;
2. the same for kills at random moments: five by default, a hundred in the slow suite; 3. no run is killed in a way that
leaves more than one checkpoint folder half made.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from areal_agent.ledger.verify import verify
from areal_agent.trainer.checkpoint import latest_checkpoint
from areal_agent.trainer.commit_points import CommitPoint

ROOT = Path(__file__).parents[2]
NEVER = "never"
MAX_EVENTS_A_LIFE = 60

storms = pytest.mark.parametrize(
    "num_kills", [pytest.param(5, id="5 kills"), pytest.param(100, id="100 kills", marks=pytest.mark.slow)]
)


class Zygote:
    """The warm parent of all lives; one of them at a time."""

    def __init__(self, tokenizer: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.resume.zygote", tokenizer],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},  # it forks
        )

    def live(self, folder: Path, *, fatal: str = NEVER, number: int = 1, kill_after: int | None = None) -> list[str]:
        """What a life told, from its birth to its death; `kill_after` so many events, somebody else kills it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {fatal} {number}\n")
        self._process.stdin.flush()
        events: list[str] = []
        pid = int(self._next().removeprefix("pid "))
        while not (event := self._next()).startswith("dead"):
            events.append(event)
            if len(events) == kill_after:
                os.kill(pid, signal.SIGKILL)
        return [*events, event]

    def close(self) -> None:
        self._process.communicate()

    def _next(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the zygote is gone; its errors are above"
        return line


@pytest.fixture(scope="module")
def zygote(small_model: Path) -> Iterator[Zygote]:
    zygote = Zygote(small_model)
    yield zygote
    zygote.close()


def check_life(folder: Path) -> None:
    """What has to hold however the last process died."""
    assert verify(folder / "ledger.sqlite").violations == ()
    half_made = [path for path in (folder / "checkpoints").glob(".*") if not path.name.startswith(".aside")]
    assert len(half_made) <= 1


def check_end(folder: Path) -> None:
    """Every rollout that ended is trained, once, in the lineage of the last checkpoint; nothing else is."""
    check_life(folder)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    lineage: list[str] = orjson.loads((checkpoint.path / "weights.json").read_bytes())
    assert len(lineage) == len(set(lineage))
    assert ids(folder, "SELECT session FROM fates WHERE trained_step IS NOT NULL") == set(lineage)
    assert set(lineage) == ids(
        folder, "SELECT s.id FROM sessions s JOIN endings e ON e.session = s.number WHERE e.status = 'completed'"
    )


def ids(folder: Path, query: str) -> set[str]:
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection:
        return {session_id for (session_id,) in connection.execute(query)}


def test_killed_at_every_commit_point(zygote: Zygote, tmp_path: Path) -> None:
    for point in CommitPoint:
        *_, last, death = zygote.live(tmp_path, fatal=point)
        assert (last, death) == (point, f"dead {-signal.SIGKILL}")
        check_life(tmp_path)
    assert zygote.live(tmp_path)[-1] == "dead 0"
    check_end(tmp_path)


@storms
def test_killed_at_random_moments(zygote: Zygote, tmp_path: Path, num_kills: int) -> None:
    moments = random.Random(num_kills)
    for _ in range(num_kills):
        zygote.live(tmp_path, kill_after=moments.randint(1, MAX_EVENTS_A_LIFE))
        check_life(tmp_path)
    assert zygote.live(tmp_path)[-1] == "dead 0"
    check_end(tmp_path)
