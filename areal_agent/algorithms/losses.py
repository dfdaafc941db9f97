"""The policy loss and what is worth knowing about it. Pure functions over the loss tokens of one micro-batch.

Losses are *sums over tokens divided by the number of loss tokens of the whole optimiser step*, which the caller counts
before it splits the step: the losses of micro-batches add up to the loss of the step, however it was split.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to it: e**20 is far outside every clip, and e**89 would be infinite in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStats:
    """Sums and maxima over loss tokens, which add up over micro-batches exactly; means are taken at the end."""

    num_tokens: int = 0
    ratio_sum: float = 0.0  # pi_theta / pi_prox
    ratio_max: float = 0.0
    clipped_low: float = 0.0  # tokens whose gradient the lower clip cut off
    clipped_high: float = 0.0
    kl_sum: float = 0.0  # of theta to the proximal policy, estimator k3
    weight_sum: float = 0.0  # pi_prox / pi_behav, capped
    weight_square_sum: float = 0.0
    weight_max: float = 0.0  # before the cap
    capped: float = 0.0

    def merge(self, other: Self) -> Self:
        """The statistics of both together."""
        return type(self)(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio_sum=self.ratio_sum + other.ratio_sum,
            ratio_max=max(self.ratio_max, other.ratio_max),
            clipped_low=self.clipped_low + other.clipped_low,
            clipped_high=self.clipped_high + other.clipped_high,
            kl_sum=self.kl_sum + other.kl_sum,
            weight_sum=self.weight_sum + other.weight_sum,
            weight_square_sum=self.weight_square_sum + other.weight_square_sum,
            weight_max=max(self.weight_max, other.weight_max),
            capped=self.capped + other.capped,
        )

    def metrics(self) -> dict[str, float]:
        """Means a token. The effective sample size is (sum w)^2 / sum w^2 over the number of tokens: 1 is ideal."""
        count = max(self.num_tokens, 1)
        return {
            "ratio_mean": self.ratio_sum / count,
            "ratio_max": self.ratio_max,
            "clip_fraction_low": self.clipped_low / count,
            "clip_fraction_high": self.clipped_high / count,
            "approx_kl": self.kl_sum / count,
            "behavior_weight_mean": self.weight_sum / count,
            "behavior_weight_max": self.weight_max,
            "behavior_weight_capped_fraction": self.capped / count,
            "effective_sample_size": self.weight_sum**2 / max(self.weight_square_sum, 1e-30) / count,
        }


def decoupled_ppo(
    logprobs: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    config: AlgorithmConfig,
    *,
    num_loss_tokens: int,
) -> tuple[Tensor, LossStats]:
    """The decoupled PPO objective (AReaL, arXiv 2505.24298, eq. 5), negated to be minimised.

    L = -1/N sum_t w_t min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t),
    u_t = pi_theta / pi_prox (the clip is around the trainer's policy at the start of the step),
    w_t = min(pi_prox / pi_behav, behavior_weight_cap), detached: it corrects for the policy that sampled the token.
    The gradient flows through `logprobs` alone. N is `num_loss_tokens`, of the whole optimiser step: a token-mean.
    Shapes: all [M], log-probabilities in nats -> scalar.
    """
    assert logprobs.ndim == 1, logprobs.shape
    assert logprobs.shape == proximal.shape == behavior.shape == advantages.shape, (proximal.shape, behavior.shape)
    proximal, behavior = proximal.detach(), behavior.detach()
    uncapped = (proximal - behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = uncapped.clamp_max(config.behavior_weight_cap)
    log_ratio = (logprobs - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = -(weight * torch.minimum(ratio * advantages, clipped * advantages)).sum() / max(num_loss_tokens, 1)
    return loss, _stats(log_ratio.detach(), advantages, uncapped, weight, config)


def _stats(
    log_ratio: Tensor, advantages: Tensor, uncapped: Tensor, weight: Tensor, config: AlgorithmConfig
) -> LossStats:
    num_tokens = len(log_ratio)
    if num_tokens == 0:
        return LossStats()
    ratio = log_ratio.exp()
    values = torch.stack(
        [
            ratio.sum(),
            ratio.max(),
            ((advantages < 0) & (ratio < 1.0 - config.clip_low)).sum(),
            ((advantages > 0) & (ratio > 1.0 + config.clip_high)).sum(),
            k3(log_ratio).sum(),
            weight.sum(),
            weight.square().sum(),
            uncapped.max(),
            (uncapped > config.behavior_weight_cap).sum(),
        ]
    ).tolist()  # one transfer from the device, not nine
    names = ("ratio_sum", "ratio_max", "clipped_low", "clipped_high", "kl_sum")
    names += ("weight_sum", "weight_square_sum", "weight_max", "capped")
    return LossStats(num_tokens=num_tokens, **dict(zip(names, values, strict=True)))


def k3(log_ratio: Tensor) -> Tensor:
    """The k3 estimate of KL(q || p) from samples of q: p/q - 1 - log(p/q), with `log_ratio` = log(p/q). Never negative.

    Schulman, "Approximating KL divergence", 2020. Any shape -> the same shape, one estimate an element.
    """
    return log_ratio.expm1() - log_ratio
