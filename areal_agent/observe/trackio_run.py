"""trackio: a run in its local database, shown by `trackio show`. Needs the extra `trackio`."""

from collections.abc import Mapping

import trackio  # pyright: ignore[reportMissingImports]  # an extra

from areal_agent.observe.trackers import TrackedRun


class TrackioTracker:
    """Where that database lies is trackio's own affair: `TRACKIO_DIR`, or its place in the home folder."""

    def __init__(self, run: TrackedRun) -> None:
        name = f"{run.name}-{run.id}"  # it has no ids: a run is its name
        self._run = trackio.init(
            run.project,
            name=name,
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
