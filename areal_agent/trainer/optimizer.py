"""AdamW under a learning-rate schedule, with gradient clipping. It knows parameters, not models or losses."""

from collections.abc import Iterable

import torch
from torch import Tensor

from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.group import whole
from areal_agent.trainer.schedule import Schedule


class Optimizer:
    """The optimiser and the number of updates it has made, from which the learning rate follows."""

    def __init__(self, parameters: Iterable[Tensor], config: TrainerConfig, schedule: Schedule | None = None) -> None:
        self._config = config
        self._schedule = schedule or Schedule.of(config, num_updates=1)
        self._parameters = list(parameters)
        self.num_updates = 0
        decayed = [one for one in self._parameters if one.ndim >= 2]
        others = [one for one in self._parameters if one.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],  # adapters have matrices alone
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self._schedule.at(self.num_updates)

    @property
    def adamw(self) -> torch.optim.AdamW:
        """For a checkpoint: its state is by parameter, and there is none before the first update."""
        return self._adamw

    def clear_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def update(self) -> float:
        """Clip the accumulated gradients, update, clear them; returns their norm before clipping.

        A norm that is not finite leaves the weights untouched: one such update would destroy them.
        """
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.gradient_clip)))
        if norm < float("inf"):  # false for NaN as well
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self.num_updates += 1
        self.clear_gradients()
        return norm
