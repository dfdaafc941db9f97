"""Resuming with no step left to do is refused in one line, and nothing is started.

1. fewer steps than are done; 2. as many, where the run is completed; 3. as many, where it was cut off after its last
step, go on: an evaluation may be left; 4. a damaged checkpoint counts for nothing.
"""

from pathlib import Path

import pytest

from areal_agent.errors import ConfigError
from areal_agent.files import RunFolder
from areal_agent.run.preflight import require_steps_left
from areal_agent.trainer.checkpoint import publish_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run of four steps."""
    folder = RunFolder(tmp_path)
    for step in (2, 4):
        publish_checkpoint(
            folder.checkpoints, step=step, incarnation=0, run_state={}, write=lambda _: None, keep_last=2
        )
    return folder


def test_fewer_steps_than_are_done(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match=r"4 steps are done and steps is 3, .*; set steps to more than 4"):
        require_steps_left(folder, 3)


def test_as_many_of_a_completed_run(folder: RunFolder) -> None:
    folder.summary.write_text('{"status": "completed"}')
    with pytest.raises(ConfigError, match="nothing left to train"):
        require_steps_left(folder, 4)
    require_steps_left(folder, 5)


def test_as_many_of_a_run_that_was_cut_off(folder: RunFolder) -> None:
    folder.summary.write_text('{"status": "interrupted"}')
    require_steps_left(folder, 4)


def test_a_damaged_checkpoint_counts_for_nothing(folder: RunFolder) -> None:
    (folder.checkpoints / "step_000004" / "run.json").write_text("damaged")
    require_steps_left(folder, 3)
