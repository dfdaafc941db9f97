"""Weights & Biases: a run in `wandb/` of the run folder. Needs the extra `wandb`."""

import os
from collections.abc import Mapping

import wandb  # pyright: ignore[reportMissingImports]  # an extra

from areal_agent.observe.trackers import TrackedRun

MODE_VARIABLE = "WANDB_MODE"


class WandbTracker:
    """Works offline unless `WANDB_MODE` says otherwise; `wandb sync` sends it later."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode=os.environ.get(MODE_VARIABLE, "offline"),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        # W&B's own step may not go back, so ours is logged as a number and made the axis of all others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({**numbers, "step": step})

    def close(self) -> None:
        self._run.finish()
