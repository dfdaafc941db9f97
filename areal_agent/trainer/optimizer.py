"""AdamW with a learning-rate schedule, and gradients clipped at their own scale.

Once nearly all rollouts succeed, half of a run's gradients are zero and the others differ by a factor of thirty. What
keeps such a run stable is that a gradient is clipped at a quantile of those before it: no single failure makes a step
many times the usual one. A gradient of zero makes no update and is none of the quantile's norms: momentum and weight
decay do not move the weights where nothing was learned.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from areal_agent.trainer.config import LearningRateSchedule, TrainerConfig
from areal_agent.trainer.ranks import whole

NUM_NORMS, MIN_NORMS = 64, 8
"""The number of gradient norms of which a quantile is taken, and the fewest for which it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate: it rises to `peak` over `num_warmup` updates, then follows `shape` towards `floor * peak`.

    >>> linear = Schedule(shape="linear", peak=1.0, num_warmup=2, num_updates=6)
    >>> [linear.at(n) for n in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    shape: LearningRateSchedule
    peak: float
    num_warmup: int
    num_updates: int  # of the whole run; later updates keep the rate of the last
    floor: float = 0.0

    @classmethod
    def of(cls, config: TrainerConfig, num_updates: int) -> Self:
        """Return the config's schedule for a run of `num_updates` updates."""
        return cls(
            shape=config.schedule,
            peak=config.learning_rate,
            num_warmup=round(config.warmup_fraction * num_updates),
            num_updates=num_updates,
            floor=config.learning_rate_floor,
        )

    def at(self, num_done: int) -> float:
        """Return the rate of the update that follows `num_done` updates."""
        if num_done < self.num_warmup:
            return self.peak * (num_done + 1) / self.num_warmup
        num_falling = max(1, self.num_updates - self.num_warmup)
        progress = min(num_done - self.num_warmup, num_falling - 1) / num_falling
        match self.shape:
            case "constant":
                share = 1.0
            case "linear":
                share = 1.0 - progress
            case "cosine":
                share = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak * (self.floor + (1.0 - self.floor) * share)


class Optimizer:
    """AdamW and what it has seen: the number of gradients, which the learning rate follows, and their last norms.

    All of it is saved in checkpoints, and every rank has the same.
    """

    def __init__(self, parameters: Iterable[Tensor], config: TrainerConfig, schedule: Schedule | None = None) -> None:
        self._config = config
        self._schedule = schedule or Schedule.of(config, num_updates=1)
        self._parameters = list(parameters)
        self.num_updates = 0  # with those that a gradient of zero left out: the schedule ends with the run
        self.norms: deque[float] = deque(maxlen=NUM_NORMS)  # before clipping, of the last gradients that taught
        self.rate = 1.0  # multiplies the schedule's learning rate
        decayed = [one for one in self._parameters if one.ndim >= 2]
        others = [one for one in self._parameters if one.ndim < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],  # adapters have only matrices
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,  # one pass over the weights, in place of one for each operation
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self.rate * self._schedule.at(self.num_updates)

    def clear_gradients(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    @property
    def clip(self) -> float:
        """The norm to which the next gradient is scaled down if its own is larger."""
        quantile = self._config.gradient_clip_quantile
        if quantile is None or len(self.norms) < MIN_NORMS:
            return self._config.gradient_clip
        return min(self._config.gradient_clip, float(np.quantile(self.norms, quantile)))

    def update(self) -> float:
        """Clip the accumulated gradients, update the weights, clear the gradients; return their norm before clipping.

        A norm of zero makes no update. If it is not finite there is none either: it would destroy the weights.
        """
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self.clip)))
        if 0.0 < norm < float("inf"):  # false for NaN as well
            for group in self.adamw.param_groups:
                group["lr"] = self.learning_rate
            self.adamw.step()
            self.norms.append(norm)
        if norm < float("inf"):
            self.num_updates += 1
        self.clear_gradients()
        return norm
