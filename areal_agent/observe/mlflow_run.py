"""MLflow: a run in the store `mlflow.db` of the run folder. Needs the extra `mlflow`."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # an extra
from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

from areal_agent.observe.trackers import TrackedRun

URI_VARIABLE = "MLFLOW_TRACKING_URI"
ID_TAG = "areal_agent.run"
FORBIDDEN = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not accept in a name."""


class MlflowTracker:
    """Writes into an SQLite file, unless `MLFLOW_TRACKING_URI` names a server or another store."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder.resolve()
        self._client = MlflowClient(os.environ.get(URI_VARIABLE) or f"sqlite:///{folder / 'mlflow.db'}")
        experiment_id = self._experiment(run.project, folder)
        found = self._client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            return
        made = self._client.create_run(experiment_id, run_name=run.name, tags={ID_TAG: run.id})
        self._id = made.info.run_id
        self._client.log_batch(self._id, params=[Param(key, value) for key, value in _flat(run.config).items()])

    def _experiment(self, name: str, folder: Path) -> str:
        """Return the id of an experiment, made when it is new. MLflow wants a place for artifacts; a run has none."""
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        is_elsewhere = URI_VARIABLE in os.environ
        place = None if is_elsewhere else (folder / "mlartifacts").as_uri()
        return self._client.create_experiment(name, artifact_location=place)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(FORBIDDEN.sub("_", name), number, now_ms, step) for name, number in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return values by dotted key, as text: MLflow's parameters have no sections."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = FORBIDDEN.sub("_", f"{prefix}{key}")
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return flat
