"""The learning rate by the number of updates made: a linear warm-up, then constant, linear or cosine. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Self

from areal_agent.trainer.config import LearningRateSchedule, TrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Rises to `peak` over `num_warmup` updates, then follows `shape` down to zero, which no update of a run reaches.

    >>> linear = Schedule(shape="linear", peak=1.0, num_warmup=2, num_updates=6)
    >>> [linear.at(n) for n in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    shape: LearningRateSchedule
    peak: float
    num_warmup: int
    num_updates: int  # of the whole run; updates beyond have the rate of the last

    @classmethod
    def of(cls, config: TrainerConfig, num_updates: int) -> Self:
        """As the section says it, for a run of so many updates."""
        return cls(
            shape=config.schedule,
            peak=config.learning_rate,
            num_warmup=round(config.warmup_fraction * num_updates),
            num_updates=num_updates,
        )

    def with_peak(self, peak: float) -> Self:
        return replace(self, peak=peak)

    def at(self, num_done: int) -> float:
        """The rate of the update after `num_done` updates."""
        if num_done < self.num_warmup:
            return self.peak * (num_done + 1) / self.num_warmup
        num_falling = max(1, self.num_updates - self.num_warmup)
        progress = min(num_done - self.num_warmup, num_falling - 1) / num_falling
        match self.shape:
            case "constant":
                return self.peak
            case "linear":
                return self.peak * (1.0 - progress)
            case "cosine":
                return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
