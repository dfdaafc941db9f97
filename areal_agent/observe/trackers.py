"""Trackers (TensorBoard and its like) beside a run, each in a thread of its own, so that none can hold up the run.

Rows wait in a queue for the tracker's thread, which also opens the tracker. A tracker that fails is reported in one
warning; one that hangs loses rows once its queue is full, and is left behind at the end. Only the trackers that a
config names are imported.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from areal_agent.errors import ConfigError

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    numbers: Mapping[str, float]


class BackgroundTracker:
    """One tracker and its thread, a daemon: the process may end without it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._make = make
        self._entries: queue.Queue[_Entry | None] = queue.Queue(MAX_WAITING)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue a row and return at once."""
        if not self._thread.is_alive():
            return
        try:
            self._entries.put_nowait(_Entry(step, numbers))
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
            self._try(lambda one=entry: tracker.log(one.step, one.numbers))
        self._try(tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
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
    """Start a thread for each tracker, which opens it while the run goes on."""
    return Trackers([BackgroundTracker(name.value, partial(open_tracker, name, run)) for name in names])


def open_tracker(name: TrackerName, run: TrackedRun) -> Tracker:
    """Open a tracker. Raises whatever it raises."""
    module = importlib.import_module(f"areal_agent.observe.{name.value}_run")
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
