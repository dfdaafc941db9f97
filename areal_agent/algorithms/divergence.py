"""Estimates of a divergence between two policies from samples of one. Pure functions.

Schulman, "Approximating KL divergence", 2020: of KL(q || p) from samples of q, with `log_ratio` = log p/q there.
Any shape -> the same shape, one estimate an element, in nats.
"""

from typing import Literal

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to it: e**20 is far outside every clip, and e**89 would be infinite in float32."""


def k1(log_ratio: Tensor) -> Tensor:
    """-log p/q: unbiased, of either sign, with a large variance."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log p/q)^2 / 2: biased, never negative; its gradient is unbiased."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """p/q - 1 - log p/q: unbiased and never negative."""
    return log_ratio.expm1() - log_ratio


def divergence(policy: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(policy || reference) a token, from the log-probabilities of tokens; differentiable in `policy`: [M] -> [M]."""
    assert policy.shape == reference.shape, (policy.shape, reference.shape)
    log_ratio = (reference.detach() - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return k1(log_ratio)
        case "k2":
            return k2(log_ratio)
        case "k3":
            return k3(log_ratio)
