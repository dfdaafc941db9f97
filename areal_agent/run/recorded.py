"""What a run records of each of its trainers, so that its steps can be made again (areal_agent/replay)."""

from collections.abc import Mapping
from typing import Self

from areal_agent.config import Config
from areal_agent.section import Section
from areal_agent.trainer.config import TrainerSetup
from areal_agent.trainer.wire import TrainerInfo


class TrainerRecord(Section):
    """How the trainer of one process of a run was set up. With the batches of its steps they can be made again."""

    config: Config
    setup: TrainerSetup
    weights: str
    """The digest of the trained weights that it began with (trainer/digests.py)."""
    frozen: str
    """The digest of the weights that stay as they are."""
    numerics: Mapping[str, str]
    """What the last bits of its steps depend on: versions, processor, threads."""

    @classmethod
    def of(cls, config: Config, setup: TrainerSetup, info: TrainerInfo) -> Self:
        folders = {name: path.absolute() for name in ("model", "base", "teacher") if (path := getattr(setup, name))}
        setup = setup.model_copy(update=folders)  # a replay may be started elsewhere
        return cls(config=config, setup=setup, weights=info.weights, frozen=info.frozen, numerics=info.numerics)
