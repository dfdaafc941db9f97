"""The config section of what a person sees."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from areal_agent.observe.trackers import TrackerName
from areal_agent.section import Section


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

    @field_validator("trackers")
    @classmethod
    def _each_once(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"is {[name.value for name in value]}; name each tracker once")
        return value
