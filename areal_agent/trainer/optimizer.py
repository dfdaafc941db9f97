"""AdamW with a learning-rate schedule and gradient clipping."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from areal_agent.trainer.config import LearningRateSchedule, TrainerConfig
from areal_agent.trainer.ranks import whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate: it rises to `peak` over `num_warmup` updates, then follows `shape` towards zero.

    >>> linear = Schedule(shape="linear", peak=1.0, num_warmup=2, num_updates=6)
    >>> [linear.at(n) for n in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    shape: LearningRateSchedule
    peak: float
    num_warmup: int
    num_updates: int  # of the whole run; later updates keep the rate of the last

    @classmethod
    def of(cls, config: TrainerConfig, num_updates: int) -> Self:
        """Return the config's schedule for a run of `num_updates` updates."""
        return cls(
            shape=config.schedule,
            peak=config.learning_rate,
            num_warmup=round(config.warmup_fraction * num_updates),
            num_updates=num_updates,
        )

    def at(self, num_done: int) -> float:
        """Return the rate of the update that follows `num_done` updates."""
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


class Optimizer:
    """The optimiser and the number of updates it has made, from which the learning rate follows."""

    def __init__(self, parameters: Iterable[Tensor], config: TrainerConfig, schedule: Schedule | None = None) -> None:
        self._config = config
        self._schedule = schedule or Schedule.of(config, num_updates=1)
        self._parameters = list(parameters)
        self.num_updates = 0
        self.rate = 1.0  # multiplies the schedule's learning rate
        decayed = [one for one in self._parameters if one.ndim >= 2]
        others = [one for one in self._parameters if one.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],  # adapters have only matrices
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.rate * self._schedule.at(self.num_updates)

    def clear_gradients(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def update(self) -> float:
        """Clip the accumulated gradients, update the weights, clear the gradients; return their norm before clipping.

        If the norm is not finite, the weights stay as they are: such an update would destroy them.
        """
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.gradient_clip)))
        if norm < float("inf"):  # false for NaN as well
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate
            self.adamw.step()
            self.num_updates += 1
        self.clear_gradients()
        return norm
