"""Trackers (TensorBoard and its like) beside a run, and the config section `observe` that names them.

Each has a thread of its own, so that none can hold up the run. Rows wait in a queue for the tracker's thread, which
also opens the tracker. A tracker that fails is reported in one warning; one that hangs loses rows once its queue is
full, and is left behind at the end. Each needs an extra of its name, which is imported only when a run uses it.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, field_validator

from areal_agent.errors import ConfigError
from areal_agent.section import Section

logger = logging.getLogger(__name__)


class TrackerName(StrEnum):
    """The trackers, each an extra of the same name."""

    TENSORBOARD = "tensorboard"  # event files in the run folder
    WANDB = "wandb"  # Weights & Biases, offline in the run folder; WANDB_MODE=online sends
    MLFLOW = "mlflow"  # an SQLite file in the run folder; MLFLOW_TRACKING_URI sends
    TRACKIO = "trackio"  # its local database

    @property
    def package(self) -> str:
        """The package that has to be importable."""
        return "tensorboardX" if self is TrackerName.TENSORBOARD else self.value


class ObserveConfig(Section):
    """The display and the trackers of a run; metrics.jsonl, curve.png and summary.json are always written."""

    progress: Literal["auto", "plain", "none"] = "auto"
    """`auto`: a live bar in a terminal, one line per step elsewhere."""
    trackers: tuple[TrackerName, ...] = ()
    """Further receivers of metrics: `tensorboard`, `wandb` (offline unless `WANDB_MODE` says otherwise) and `mlflow` (a
    file unless `MLFLOW_TRACKING_URI` names a server) write into the run folder, `trackio` into its own database. Each
    is an extra: `areal_agent[tensorboard]`. A tracker that fails does not stop the run.
    """
    project: Annotated[str, Field(min_length=1)] = "areal_agent"
    """The project under which `wandb`, `mlflow` and `trackio` list the run; its name there is that of its folder."""

    token_records: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The share of trained trajectories for which the trainer keeps what it saw of each token: its log-probability, the
    ratio and the advantage. `python -m areal_agent.view` shows them; `token_records/` in the run folder has them."""

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"is {[name.value for name in value]}; name each tracker once")
        return value


def require_installed(names: Iterable[TrackerName]) -> None:
    """Raise ConfigError for the first tracker whose package is missing."""
    for name in names:
        found = importlib.util.find_spec(name.package)
        if found is None or found.origin is None:  # a mere folder of that name, as wandb makes them, is no package
            raise ConfigError(
                f"observe.trackers: {name.value!r} needs the package {name.package}, which is not installed; "
                f"pip install 'areal_agent[{name.value}]', or leave it out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """One run, as a tracker shows it."""

    id: str  # unique to the run, and the same whenever it is resumed
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    first_step: int  # the next step: a tracker's rows of it and of later steps belong to a lineage that died


class Tracker(Protocol):
    """Receives the numbers of steps. All calls come from one thread, `close` last; its errors do not stop the run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers. Steps may repeat and go back: an evaluation ends after the step that it belongs to."""
        ...

    def close(self) -> None:
        """Write everything that is held back; nothing follows."""
        ...


MAX_WAITING = 1000
"""The limit of rows that wait for a slow tracker."""
CLOSE_S = 60.0
"""The time that the end of a run waits for all its trackers together."""


class BackgroundTracker:
    """One tracker and its thread, a daemon: the process may end without it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._make = make
        self._entries: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MAX_WAITING)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue a row and return at once."""
        if not self._thread.is_alive():
            return
        try:
            self._entries.put_nowait((step, numbers))
        except queue.Full:
            self._warn(f"is too slow; rows are left out from step {step} on")

    def close(self, deadline: float) -> None:
        """Wait until the tracker has everything, at most until `deadline` (monotonic)."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._entries.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("did not finish in time; it is left behind")

    def _run(self) -> None:
        try:
            tracker = self._make()
        except Exception as error:  # the boundary: a tracker may fail in any way, and none of them stops a run
            self._warn("cannot be opened", error)
            return
        while (entry := self._entries.get()) is not None:
            self._try(tracker.log, *entry)
        self._try(tracker.close)

    def _try(self, call: Callable[..., None], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # the boundary, as above
            self._warn("failed; what it shows is incomplete", error)

    def _warn(self, what: str, error: Exception | None = None) -> None:
        """Warn once: a tracker that failed may fail at every step."""
        if not self._has_warned:
            self._has_warned = True
            why = "" if error is None else f": {type(error).__name__}: {' '.join(str(error).split())}"
            logger.warning("the tracker %s %s%s; metrics.jsonl has everything", self._name, what, why)


class Trackers:
    """All trackers of a run. End it with `aclose`."""

    def __init__(self, trackers: Sequence[BackgroundTracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, numbers)

    async def aclose(self) -> None:
        """Wait for all of them, for at most `CLOSE_S`."""
        deadline = time.monotonic() + CLOSE_S
        await asyncio.gather(*(asyncio.to_thread(tracker.close, deadline) for tracker in self._trackers))


class TensorBoardTracker:
    """An event file in `tensorboard/` of the run folder, shown by `tensorboard --logdir runs`.

    A resumed run purges the steps of a dead lineage.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        folder, file = run.folder / "tensorboard", f".from_step_{run.first_step}"  # else named by the second alone
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step, filename_suffix=file)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run in `wandb/` of the run folder, offline unless `WANDB_MODE` says otherwise; `wandb sync` sends it later."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        # W&B's own step may not go back, so ours is logged as a number and made the axis of all others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()


RUN_TAG = "areal_agent.run"
FORBIDDEN_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


class MlflowTracker:
    """A run in the store `mlflow.db` of the run folder, unless `MLFLOW_TRACKING_URI` names another store."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient, entities  # pyright: ignore[reportMissingImports]

        self._entities = entities
        folder, uri = run.folder.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        self._client = client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if experiment := client.get_experiment_by_name(run.project):
            experiment_id = experiment.experiment_id
        else:  # MLflow wants a place for artifacts; a run has none
            place = None if uri else (folder / "mlartifacts").as_uri()
            experiment_id = client.create_experiment(run.project, artifact_location=place)
        if found := client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1):
            self._id = found[0].info.run_id
            client.set_terminated(self._id, "RUNNING")
        else:
            self._id = client.create_run(experiment_id, run_name=run.name, tags={RUN_TAG: run.id}).info.run_id
            params = [entities.Param(key, value) for key, value in _flat(run.config).items()]
            client.log_batch(self._id, params=params)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        named = {FORBIDDEN_IN_MLFLOW.sub("_", name): number for name, number in numbers.items()}
        metrics = [self._entities.Metric(name, number, now_ms, step) for name, number in named.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return values by dotted key, as text: MLflow's parameters have no sections."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = FORBIDDEN_IN_MLFLOW.sub("_", f"{prefix}{key}")
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return flat


class TrackioTracker:
    """A run in trackio's own database, in `TRACKIO_DIR` or the home folder, shown by `trackio show`."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        name = f"{run.name}-{run.id}"  # trackio has no ids: a run is its name
        options = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        self._run = trackio.init(run.project, name=name, config=dict(run.config), **options)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[TrackerName, Callable[[TrackedRun], Tracker]] = {
    TrackerName.TENSORBOARD: TensorBoardTracker,
    TrackerName.WANDB: WandbTracker,
    TrackerName.MLFLOW: MlflowTracker,
    TrackerName.TRACKIO: TrackioTracker,
}


def start_trackers(names: Iterable[TrackerName], run: TrackedRun) -> Trackers:
    """Start a thread for each tracker, which opens it while the run goes on."""
    return Trackers([BackgroundTracker(name.value, partial(TRACKERS[name], run)) for name in names])
