"""Which trackers there are and what each needs, and from its name to a tracker. It loads those that are asked for."""

import importlib
import importlib.util
from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from typing import cast

from areal_agent.errors import ConfigError
from areal_agent.observe.trackers.background import BackgroundTracker, Trackers
from areal_agent.observe.trackers.tracker import TrackedRun, Tracker


class TrackerName(StrEnum):
    """The trackers, each an extra of the same name."""

    TENSORBOARD = "tensorboard"  # event files in the run folder
    WANDB = "wandb"  # Weights & Biases, offline in the run folder; WANDB_MODE=online sends
    MLFLOW = "mlflow"  # an SQLite file in the run folder; MLFLOW_TRACKING_URI sends
    TRACKIO = "trackio"  # its local database

    @property
    def package(self) -> str:
        """What has to be importable."""
        return "tensorboardX" if self is TrackerName.TENSORBOARD else self.value


def require_installed(names: Iterable[TrackerName]) -> None:
    """Raise ConfigError for the first tracker whose package is missing."""
    for name in names:
        found = importlib.util.find_spec(name.package)
        if found is None or found.origin is None:  # a mere folder of that name, as wandb makes them, is no package
            raise ConfigError(
                f"observe.trackers: {name.value!r} needs the package {name.package}, which is not installed; "
                f"pip install 'areal_agent[{name.value}]', or leave it out"
            )


def start_trackers(names: Iterable[TrackerName], run: TrackedRun) -> Trackers:
    """All of them, opened beside what goes on."""
    return Trackers([BackgroundTracker(name.value, partial(open_tracker, name, run)) for name in names])


def open_tracker(name: TrackerName, run: TrackedRun) -> Tracker:
    """Open it; raises whatever that tracker raises."""
    module = importlib.import_module(f"areal_agent.observe.trackers.{name.value}_run")
    match name:
        case TrackerName.TENSORBOARD:
            tracker = module.TensorBoardTracker(run)
        case TrackerName.WANDB:
            tracker = module.WandbTracker(run)
        case TrackerName.MLFLOW:
            tracker = module.MlflowTracker(run)
        case TrackerName.TRACKIO:
            tracker = module.TrackioTracker(run)
    return cast(Tracker, tracker)
