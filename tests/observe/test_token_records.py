"""What the trainer saw of tokens: 1. a share of the trajectories is chosen by name, the same by every rank; 2. what is
read is what was written, of several ranks and branches; 3. a step that is trained again replaces its file; 4. a damaged
file is named; a disk that fails ends nothing.
"""

import logging
from pathlib import Path

import numpy as np
import pytest

from areal_agent.errors import LedgerError
from areal_agent.observe.token_records import FOLDER, SeenTokens, TokenRecorder, read_seen


def seen(*positions: int) -> SeenTokens:
    values = np.array(positions, np.float32)
    return SeenTokens(np.array(positions, np.int32), -values, -2 * values, values / 2)


def lists(run_dir: Path, step: int, session_id: str) -> dict[int, list[list[float]]]:
    return {branch: [one.tolist() for one in kept] for branch, kept in read_seen(run_dir, step, session_id).items()}


def test_a_share_is_chosen_by_name(tmp_path: Path) -> None:
    names = [f"g{number:06d}-{sibling}" for number in range(500) for sibling in range(4)]
    chosen = {name for name in names if TokenRecorder(tmp_path, 0.05).keeps(name)}
    assert chosen == {name for name in names if TokenRecorder(tmp_path, 0.05, rank=1).keeps(name)}
    assert 60 < len(chosen) < 140  # of 2,000
    steps = [
        {f"g{group:06d}-{sibling}" for group in range(first, first + 8) for sibling in range(8)}
        for first in range(0, 480, 8)
    ]
    assert sum(not any(map(TokenRecorder(tmp_path, 0.05).keeps, step)) for step in steps) < 8  # of 60
    assert all(TokenRecorder(tmp_path, 1.0).keeps(name) for name in names)
    assert not any(TokenRecorder(tmp_path, 0.0).keeps(name) for name in names)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    first, second = TokenRecorder(tmp_path / FOLDER, 1.0), TokenRecorder(tmp_path / FOLDER, 1.0, rank=1)
    first.add("a", 0, seen(2, 3))
    first.add("b", 0, seen(5))
    second.add("a", 1, seen(7))
    first.write(12)
    second.write(12)
    assert lists(tmp_path, 12, "a") == {0: [[2, 3], [-2, -3], [-4, -6], [1, 1.5]], 1: [[7], [-7], [-14], [3.5]]}
    assert lists(tmp_path, 12, "b") == {0: [[5], [-5], [-10], [2.5]]}
    assert lists(tmp_path, 12, "c") == lists(tmp_path, 1, "a") == {}


def test_a_step_that_is_trained_again_replaces_its_file(tmp_path: Path) -> None:
    recorder = TokenRecorder(tmp_path / FOLDER, 1.0)
    recorder.add("a", 0, seen(1))
    recorder.write(1)
    recorder.add("b", 0, seen(2))
    recorder.write(1)
    assert lists(tmp_path, 1, "a") == {}
    assert list(lists(tmp_path, 1, "b")) == [0]
    recorder.write(1)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == []


def test_damage_is_named_and_a_failing_disk_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TokenRecorder(tmp_path / FOLDER, 1.0)
    recorder.add("a", 0, seen(1))
    recorder.write(1)
    path = tmp_path / FOLDER / "step_000001-0.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LedgerError, match=r"step_000001-0\.npz is damaged: .*; remove that file"):
        read_seen(tmp_path, 1, "a")
    (tmp_path / "file").touch()
    other = TokenRecorder(tmp_path / "file" / "under", 1.0)
    other.add("a", 0, seen(1))
    with caplog.at_level(logging.WARNING):
        other.write(1)
    assert "could not be written: Not a directory" in caplog.text
