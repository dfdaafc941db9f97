"""What a policy loss is computed from: the loss tokens of one micro-batch. It knows no loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_agent.algorithms.divergence import MAX_LOG_RATIO


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTokens:
    """M loss tokens, log-probabilities and entropy in nats. The gradient flows through `logprobs` and `entropy` alone.

    A sequence is one branch of a rollout; all its loss tokens are in the same micro-batch. `weights` are fixed over the
    whole optimiser update, before it is split (aggregation.py).
    """

    logprobs: Tensor  # [M], of the policy that is trained
    entropy: Tensor  # [M], of its distribution at each token
    proximal: Tensor  # [M], log-probabilities of the policy around which ratios are clipped
    behavior: Tensor  # [M], log-probabilities of the policy that sampled
    advantages: Tensor  # [M]
    weights: Tensor  # [M]
    sequences: Tensor  # [M] int64: equal numbers for tokens of one sequence
    reference: Tensor | None = None  # [M], log-probabilities of the reference model

    def __post_init__(self) -> None:
        for field in ("entropy", "proximal", "behavior", "advantages", "weights", "sequences", "reference"):
            value: Tensor | None = getattr(self, field)
            if value is not None and (value.ndim != 1 or value.shape != self.logprobs.shape):
                raise ValueError(f"{field} is of shape {tuple(value.shape)}, logprobs of {tuple(self.logprobs.shape)}")

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def log_ratio(self) -> Tensor:
        """log pi_theta / pi_prox, clamped; differentiable. [M]"""
        return (self.logprobs - self.proximal.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def log_importance(self) -> Tensor:
        """log pi_prox / pi_behav, not clamped; no gradient. [M]"""
        return (self.proximal - self.behavior).detach()

    def sequence_sums(self, values: Tensor) -> Tensor:
        """The sum of `values` over each token's sequence, for each token: [M] -> [M]."""
        if len(values) == 0:
            return values
        num_sequences = int(self.sequences.max()) + 1
        return values.new_zeros(num_sequences).index_add(0, self.sequences, values)[self.sequences]

    def sequence_means(self, values: Tensor) -> Tensor:
        """The mean of `values` over each token's sequence, for each token: [M] -> [M]."""
        return self.sequence_sums(values) / self.sequence_sums(torch.ones_like(values))
