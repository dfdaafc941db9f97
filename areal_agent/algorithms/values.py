"""The loss of a critic. Pure functions over the loss tokens of one micro-batch."""

import torch
from torch import Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, *, clip: float) -> tuple[Tensor, int]:
    """The clipped squared error of PPO's critic (arXiv 2005.12729, section 3), and how many tokens were clipped.

    L = sum_t w_t 1/2 max((V_t - R_t)^2, (V_t^clip - R_t)^2),  V_t^clip = old_t + clip(V_t - old_t, -clip, clip),
    with the values `old` from the start of the step. The gradient flows through `values` alone.
    Shapes: all [M] -> scalar, count. Normalised by `weights`, as the policy's loss.
    """
    assert values.shape == old.shape == returns.shape == weights.shape, (values.shape, old.shape, returns.shape)
    old, returns = old.detach(), returns.detach()
    error = (values - returns).square()
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    num_clipped = int((clipped > error).sum()) if len(values) else 0
    return (weights * torch.maximum(error, clipped)).sum() / 2, num_clipped
