"""Tracker: what a run needs of TensorBoard and its like, and TrackedRun: what they are told of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """One run, as a tracker shows it."""

    id: str  # the same whenever the run is resumed, and no other run's
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    first_step: int  # the next step: what a tracker has of it and of later ones is of a lineage that died


class Tracker(Protocol):
    """Takes numbers of a step. All calls come from one thread, `close` last; what they raise stops nothing."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Steps may repeat and go back: an evaluation ends after the step that it is of."""
        ...

    def close(self) -> None:
        """Nothing more comes: what is held back has to be out when this returns."""
        ...
