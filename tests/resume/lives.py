"""The lives and deaths of one scripted run, and what has to hold after each of them. A helper of tests."""

import os
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

ROOT = Path(__file__).parents[2]
NEVER = "never"


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

    def live(
        self, folder: Path, *, num_steps: int = 6, fatal: str = NEVER, number: int = 1, kill_after: int | None = None
    ) -> list[str]:
        """What a life told, from its birth to its death; `kill_after` so many events, somebody else kills it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {num_steps} {fatal} {number}\n")
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
