"""trackio: a run in its local database, shown by `trackio show`. Needs the extra `trackio`."""

from collections.abc import Mapping

import trackio  # pyright: ignore[reportMissingImports]  # an extra

from areal_agent.observe.trackers import TrackedRun


class TrackioTracker:
    """Writes into trackio's own database, in `TRACKIO_DIR` or the home folder."""

    def __init__(self, run: TrackedRun) -> None:
        name = f"{run.name}-{run.id}"  # trackio has no ids: a run is its name
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
