"""The config section of the algorithm: a preset and what may be overridden in it. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from areal_agent.section import Section

Preset = Literal["grpo", "rloo"]


class AlgorithmConfig(Section):
    """How rewards become gradients. In YAML a bare preset name is `{preset: NAME}`.

    >>> AlgorithmConfig(preset="rloo").divides_by_std
    False
    """

    preset: Preset = "grpo"
    """`grpo`: the group's mean reward is the baseline. `rloo`: the mean reward of the other rollouts of the group."""
    normalize_by_std: bool | None = None
    """Divide advantages by the group's standard deviation. By default as the preset's paper: grpo yes, rloo no."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio to the proximal policy is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio to the proximal policy is clipped above 1 + clip_high."""
    behavior_weight_cap: Annotated[float, Field(ge=1)] = 5.0
    """The importance weight (proximal over behaviour probability) of a token is truncated here."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimiser updates a train step, each on its own share of the rollouts."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of rewards from turn to turn; tokens within a turn, and observations, are not discounted."""

    @property
    def divides_by_std(self) -> bool:
        """`normalize_by_std`, or the preset's own choice."""
        return self.preset == "grpo" if self.normalize_by_std is None else self.normalize_by_std
