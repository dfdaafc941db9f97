"""TensorBoard: an event file in `tensorboard/` of the run folder. Needs the extra `tensorboard`."""

from collections.abc import Mapping

from tensorboardX import SummaryWriter

from areal_agent.observe.trackers import TrackedRun


class TensorBoardTracker:
    """Shown by `tensorboard --logdir runs`. A resumed run purges the steps of a dead lineage."""

    def __init__(self, run: TrackedRun) -> None:
        folder, file = run.folder / "tensorboard", f".from_step_{run.first_step}"  # else named by the second alone
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step, filename_suffix=file)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
