"""Trackers, the real packages where they are installed.

1. TensorBoard's event file has every number under its step, and a resumed run purges what died; 2. so have the others,
in one run over a resume; 3. a tracker that fails is told of once and gets what follows; 4. one that cannot be opened,
or hangs, holds up nobody; 5. a package that is missing is an error that names the extra, and a folder of its name is
none; 6. a config names known trackers, each once.
"""

import asyncio
import sqlite3
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from areal_agent.config import Config
from areal_agent.errors import ConfigError
from areal_agent.observe.trackers import (
    MAX_WAITING,
    BackgroundTracker,
    TrackedRun,
    TrackerName,
    Trackers,
    require_installed,
    start_trackers,
)

Logged = list[tuple[int, Mapping[str, float]]]
ROWS: Logged = [(1, {"reward/mean": 0.25, "seconds/wall": 2.0}), (2, {"reward/mean": 0.5}), (1, {"eval/success": 0.75})]


def tracked(folder: Path, first_step: int = 1) -> TrackedRun:
    config = {"seed": 0, "rollout": {"temperature": 1.0}}
    return TrackedRun(id="1a2b3c4d", name="run", project="tests", folder=folder, config=config, first_step=first_step)


def track(name: TrackerName, run: TrackedRun, rows: Logged) -> None:
    trackers = start_trackers([name], run)
    for step, numbers in rows:
        trackers.log(step, numbers)
    asyncio.run(trackers.aclose())


def events(folder: Path) -> list[Event]:
    """Of all event files: each record is a length, its checksum, the event, its checksum."""
    found: list[Event] = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def test_tensorboard_has_every_number_under_its_step(tmp_path: Path) -> None:
    track(TrackerName.TENSORBOARD, tracked(tmp_path), ROWS)
    scalars = [(one.step, v.tag, v.simple_value) for one in events(tmp_path / "tensorboard") for v in one.summary.value]
    assert scalars == [(step, name, number) for step, numbers in ROWS for name, number in numbers.items()]


def test_tensorboard_purges_what_died(tmp_path: Path) -> None:
    track(TrackerName.TENSORBOARD, tracked(tmp_path), ROWS)
    track(TrackerName.TENSORBOARD, tracked(tmp_path, first_step=2), [(2, {"reward/mean": 1.0})])
    starts = [one.step for one in events(tmp_path / "tensorboard") if one.session_log.status == 1]  # START
    assert starts == [1, 2]


@pytest.mark.slow
def test_mlflow_has_one_run_over_a_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    track(TrackerName.MLFLOW, tracked(tmp_path), ROWS)
    track(TrackerName.MLFLOW, tracked(tmp_path, first_step=3), [(3, {"reward/mean": 1.0})])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    rewards = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in rewards] == [(1, 0.25), (2, 0.5), (3, 1.0)]
    assert (run.info.status, run.data.params["rollout.temperature"]) == ("FINISHED", "1.0")


@pytest.mark.slow
def test_trackio_has_one_run_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when trackio is loaded
    pytest.importorskip("trackio")
    track(TrackerName.TRACKIO, tracked(tmp_path), ROWS)
    track(TrackerName.TRACKIO, tracked(tmp_path, first_step=3), [(3, {"reward/mean": 1.0})])
    with sqlite3.connect(tmp_path / "tests.db") as database:
        steps = database.execute("SELECT step FROM metrics WHERE instr(metrics, 'reward/mean') ORDER BY step")
        assert [step for (step,) in steps] == [1, 2, 3]


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    track(TrackerName.WANDB, tracked(tmp_path), ROWS)
    (journal,) = tmp_path.glob("wandb/offline-run-*/run-1a2b3c4d.wandb")
    content = journal.read_bytes()
    assert b"reward/mean" in content
    assert b"eval/success" in content


class Recorder:
    """A tracker that keeps what it gets, and fails when it is told to."""

    def __init__(self, fails_at: tuple[int, ...] = ()) -> None:
        self.steps: list[int] = []
        self.is_closed = False
        self._fails_at = fails_at

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step in self._fails_at:
            raise OSError("the disk is full")
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_a_tracker_that_fails_is_told_of_once_and_gets_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    moody, steady = Recorder(fails_at=(2, 3)), Recorder()
    trackers = Trackers([BackgroundTracker("moody", lambda: moody), BackgroundTracker("steady", lambda: steady)])
    for step in range(1, 5):
        trackers.log(step, {"reward/mean": 0.0})
    asyncio.run(trackers.aclose())
    assert (moody.steps, steady.steps) == ([1, 4], [1, 2, 3, 4])
    assert moody.is_closed
    assert [record.message for record in caplog.records] == [
        "the tracker moody failed; what it shows is incomplete: OSError: the disk is full; metrics.jsonl has everything"
    ]


def test_one_that_cannot_be_opened_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Recorder:
        raise ConnectionError("no route to host")

    trackers = Trackers([BackgroundTracker("distant", fail)])
    trackers.log(1, {"reward/mean": 0.0})
    asyncio.run(trackers.aclose())
    (record,) = caplog.records
    assert "the tracker distant cannot be opened: ConnectionError: no route to host" in record.message


def test_one_that_hangs_loses_rows_and_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    recorder = Recorder()
    hanging = BackgroundTracker("hanging", lambda: release.wait() and recorder)
    for step in range(MAX_WAITING + 10):
        hanging.log(step, {"reward/mean": 0.0})
    hanging.close(deadline=0.0)  # long past
    (record,) = caplog.records
    assert f"rows are left out from step {MAX_WAITING} on" in record.message
    release.set()


def test_a_missing_package_is_an_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # as `wandb` leaves it behind: a folder, and no package
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match=r"'wandb' needs the package wandb.*pip install 'areal_agent\[wandb\]'"):
        require_installed([TrackerName.WANDB])


@pytest.mark.parametrize(("trackers", "fault"), [(["tensorbord"], "tensorboard"), (["wandb", "wandb"], "once")])
def test_a_config_names_known_trackers_once(trackers: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"observe\.trackers.*{fault}"):
        Config.parse({"tasks": "m:f", "observe": {"trackers": trackers}})
