"""Policy losses. Pure functions over the loss tokens of one micro-batch.

    L = -sum_t w_t r_t J_t  +  kl_coefficient sum_t w_t KL_t  -  entropy_coefficient sum_t w_t H_t

J_t is an *objective*: `ppo_clip`, `gspo`, `cispo` or a user's own. w_t is fixed for the whole optimiser update
(aggregation.py), so the losses of micro-batches add up to the loss of the update, however it was split. r_t is the
truncated importance weight of the proximal over the behaviour policy, so with `ppo_clip` the first term is decoupled
PPO (AReaL, arXiv 2505.24298, eq. 5). The divergence and the entropy are not weighted so.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig, is_import_path
from areal_agent.algorithms.divergence import MAX_LOG_RATIO, divergence
from areal_agent.algorithms.loss_stats import LossStats
from areal_agent.algorithms.loss_tokens import LossTokens
from areal_agent.algorithms.plugins import load_loss

Objective = Callable[[LossTokens, AlgorithmConfig], Tensor]
"""What is maximised, a token: [M], differentiable in `logprobs`. Not weighted, not aggregated."""


def choose_objective(config: AlgorithmConfig) -> Objective:
    """The objective that `config.loss` names. Raises ConfigError for a function that cannot be imported."""
    match config.loss:
        case "ppo_clip":
            return ppo_clip
        case "gspo":
            return gspo
        case "cispo":
            return cispo
        case path:
            return cast(Objective, load_loss(path))


def policy_loss(tokens: LossTokens, config: AlgorithmConfig, objective: Objective) -> tuple[Tensor, LossStats]:
    """The loss above, to be minimised, and its statistics. Shapes: LossTokens of M -> scalar."""
    uncapped = importance_weights(tokens, config)
    values = objective(tokens, config)
    if is_import_path(config.loss):
        _check_own(values, tokens, config)
    loss = -(tokens.weights * uncapped.clamp_max(config.behavior_weight_cap) * values).sum()
    if config.kl_coefficient > 0 and config.kl_in == "loss":
        assert tokens.reference is not None, "a divergence needs a reference"
        kl = divergence(tokens.logprobs, tokens.reference, config.kl_estimator)
        loss = loss + config.kl_coefficient * (tokens.weights * kl).sum()
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * (tokens.weights * tokens.entropy).sum()
    ratio = sequence_ratio(tokens) if config.loss == "gspo" else tokens.log_ratio.exp()
    return loss, LossStats.of(tokens, ratio.detach(), uncapped, config)


def _check_own(values: object, tokens: LossTokens, config: AlgorithmConfig) -> None:
    """Raise ValueError unless a user's objective is one that can be trained."""
    if not isinstance(values, Tensor) or values.shape != tokens.logprobs.shape:
        what = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{type(values).__name__}"
        raise ValueError(
            f"loss {config.loss!r} returned {what} for {len(tokens)} loss tokens; return the objective of each token"
        )
    if tokens.logprobs.requires_grad and not values.requires_grad:
        raise ValueError(
            f"loss {config.loss!r} returned what has no gradient; compute it from tokens.logprobs, not detached"
        )
    if not bool(values.isfinite().all()) and bool(tokens.logprobs.isfinite().all()):
        raise ValueError(
            f"loss {config.loss!r} returned NaN or infinity: nothing could be learned of the whole batch; return "
            "finite numbers"
        )


def ppo_clip(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), with clip-higher (2503.14476) and dual clip (1912.09729).

    J_t = min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t),  u_t = pi_theta / pi_prox;
    with `dual_clip` c, and A_t < 0: max(J_t, c A_t), so that a bad token that grew far has a bounded loss.
    Shapes: [M] -> [M].
    """
    ratio = tokens.log_ratio.exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    objective = torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if config.dual_clip is None:
        return objective
    floor = torch.maximum(objective, config.dual_clip * tokens.advantages)
    return torch.where(tokens.advantages < 0, floor, objective)


def gspo(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    """GSPO (arXiv 2507.18071), in its token form: one ratio a sequence, clipped for all its tokens alike.

    J_t = min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),  s_t = sg[s] pi_t / sg[pi_t],
    s = exp(mean_t log pi_theta / pi_prox) over the loss tokens of a sequence: each token has the value s, and the
    gradient s grad log pi_t. With one advantage a sequence and `sequence_mean` that is the sequence form, value and
    gradient. A sequence is one branch of a rollout: what branches share is in the loss of one of them, and counts in
    the ratio of that one.
    Shapes: [M] -> [M].
    """
    ratio = sequence_ratio(tokens).detach() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)


def sequence_ratio(tokens: LossTokens) -> Tensor:
    """GSPO's length-normalised ratio of each token's sequence: [M]."""
    return tokens.sequence_means(tokens.log_ratio).exp()


def cispo(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped as a weight, and no token loses its gradient.

    J_t = sg[clip(u_t, 1 - clip_low, 1 + clip_high)] A_t log pi_theta. The gradient flows through log pi_theta alone.
    Shapes: [M] -> [M].
    """
    weight = tokens.log_ratio.exp().clamp(1.0 - config.clip_low, 1.0 + config.clip_high).detach()
    return weight * tokens.advantages * tokens.logprobs


def importance_weights(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    """pi_prox / pi_behav before truncation: what corrects for the policy that sampled. Detached.

    Of each token, or of each sequence: the product over its loss tokens, which is the exact weight of the sequence
    given its observations; or 1. `policy_loss` truncates it at `behavior_weight_cap` (truncated importance sampling).
    Shapes: [M] -> [M].
    """
    log_weights = tokens.log_importance
    if config.behavior_weight_level == "none":
        return torch.ones_like(log_weights)
    if config.behavior_weight_level == "sequence":
        log_weights = tokens.sequence_sums(log_weights)
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
