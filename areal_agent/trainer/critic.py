"""The critic: the policy's architecture with one output in place of the vocabulary, and an optimiser of its own.

It begins as a copy of the policy with an output layer of zeros, so every value is 0 at first. It knows micro-batches
and returns, not how those were made.
"""

import torch
from torch import Tensor, nn

from areal_agent.algorithms.batching import MicroBatch
from areal_agent.algorithms.values import value_loss
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.group import ALONE, Group
from areal_agent.trainer.model import Policy, decoder_layers, hidden_states, mixed_precision
from areal_agent.trainer.optimizer import Optimizer
from areal_agent.trainer.recomputation import recompute
from areal_agent.trainer.schedule import Schedule


class ValueForward(nn.ModuleDict):
    """The forward pass as one module, which is what FSDP2 gathers parameters for."""

    def forward(self, batch: MicroBatch) -> Tensor:
        return self["head"](hidden_states(self["decoder"], batch))


class Critic:
    """Values of loss tokens: what the rollout will earn from each on, judged by what stands before it."""

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        *,
        learning_rate: float | None,
        clip: float,
        schedule: Schedule | None = None,
        group: Group = ALONE,
    ) -> None:
        self._device = policy.device
        self._clip = clip
        decoder = policy.backbone()
        hidden_size = int(policy.model.config.get_text_config().hidden_size)
        head = nn.Linear(hidden_size, 1, bias=False, device=policy.device)
        nn.init.zeros_(head.weight)
        self.model = ValueForward({"decoder": decoder, "head": head}).eval()
        if config.gradient_checkpointing:
            recompute(decoder_layers(decoder))
        group.shard(decoder_layers(decoder), self.model)
        own = config if learning_rate is None else config.model_copy(update={"learning_rate": learning_rate})
        own_schedule = None if schedule is None else schedule.with_peak(own.learning_rate)
        self.optimizer = Optimizer(self.model.parameters(), own, own_schedule)

    def values(self, batch: MicroBatch) -> Tensor:
        """The value of each loss token of the micro-batch, [M] float32."""
        with mixed_precision(self._device):
            return self.model(batch).squeeze(1).float()

    def backward(self, batch: MicroBatch) -> tuple[float, int]:
        """Accumulate the gradient of the clipped value loss; returns the loss, and how many values were clipped."""
        assert batch.values is not None and batch.returns is not None, "a critic learns returns"
        loss, num_clipped = value_loss(self.values(batch), batch.values, batch.returns, batch.weights, clip=self._clip)
        loss.backward()
        return float(loss.detach()), num_clipped

    def clear_gradients(self) -> None:
        self.optimizer.clear_gradients()

    def update(self) -> float:
        """As `Optimizer.update`: one update; returns the norm of the gradient."""
        return self.optimizer.update()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 is a perfect critic, 0 one that knows the mean. 0 where returns are all equal.

    Shapes: [N], [N] -> scalar.
    """
    assert values.shape == returns.shape, (values.shape, returns.shape)
    if len(returns) == 0:
        return 0.0
    spread = float(returns.var(correction=0))
    return 1.0 - float(torch.var(returns - values, correction=0)) / spread if spread > 0 else 0.0
