"""What the trainer tells the main process: records shared by both ends. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerInfo:
    """What the trainer says of itself once it has loaded its model."""

    step: int  # of the checkpoint that it goes on from; 0 for a model folder
    num_parameters: int
    device: str
    rank_process_ids: tuple[int, ...] = ()  # of ranks 1, 2, ... where there are several


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one train step did. The names of `metrics` are those of `trainer.step.Stepper.train`."""

    step: int
    metrics: Mapping[str, float]
    seconds: float
