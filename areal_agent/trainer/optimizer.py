"""AdamW with a linear warm-up and gradient clipping. It knows parameters, not models or losses."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from areal_agent.trainer.config import TrainerConfig


class Optimizer:
    """The optimiser and the number of updates it has made, from which the learning rate follows."""

    def __init__(self, parameters: Iterable[Tensor], config: TrainerConfig) -> None:
        self._config = config
        self._parameters = list(parameters)
        self.num_updates = 0
        self._adamw = torch.optim.AdamW(
            [
                {"params": [one for one in self._parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [one for one in self._parameters if one.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        warmup = self._config.warmup_steps
        return self._config.learning_rate * (min(1.0, (self.num_updates + 1) / warmup) if warmup else 1.0)

    def clear_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def update(self) -> float:
        """Clip the accumulated gradients, update, clear them; returns their norm before clipping.

        A norm that is not finite leaves the weights untouched: one such update would destroy them.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.gradient_clip))
        if norm < float("inf"):  # false for NaN as well
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            self.num_updates += 1
        self.clear_gradients()
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self._adamw.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        self.num_updates = int(state["num_updates"])
