"""Policy and critic losses. Pure functions over the loss tokens of one micro-batch.

    L = -sum_t w_t r_t J_t  +  kl_coefficient sum_t w_t KL_t  -  entropy_coefficient sum_t w_t H_t

J_t is an *objective*: `ppo_clip`, `gspo`, `cispo` or a user's own. w_t is fixed for the whole optimiser update
(packing.py), so the losses of micro-batches add up to the loss of the update, however it was split. r_t is the bounded
importance weight of the proximal over the behaviour policy, so with `ppo_clip` the first term is decoupled PPO (AReaL,
arXiv 2505.24298, eq. 5). r_t does not apply to the entropy; KL_t, of the policy from the reference, has a weight of its
own (`reverse_kl`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig, load_own
from areal_agent.section import is_import_path

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: e**20 is far outside every clip, and e**89 would be infinite in float32."""
MAX_KL = 10.0
"""The estimate of a divergence at one token is clamped to this, in nats: k3 of one outlier may be e**20."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossTokens:
    """M loss tokens, log-probabilities and entropy in nats. The gradient flows through `logprobs` and `entropy` alone.

    A sequence is one branch of a rollout; all its loss tokens are in the same micro-batch. `weights` are fixed over the
    whole optimiser update, before it is split (packing.py).
    """

    logprobs: Tensor  # [M], of the policy that is trained
    entropy: Tensor  # [M], of the policy's distribution at each token
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
                raise ValueError(
                    f"{field} has shape {tuple(value.shape)}, but logprobs {tuple(self.logprobs.shape)}; give [M] each"
                )

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def clamped_log_ratio(self) -> Tensor:
        """log pi_theta / pi_prox, clamped to MAX_LOG_RATIO either way; differentiable within. [M]"""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Sums and maxima (`*_max`) over loss tokens, which merge exactly over micro-batches and ranks. They may nest."""

    def merge(self, other: Self) -> Self:
        """Return the counts of both together."""
        names = [one.name for one in fields(self)]
        return type(self)(**{name: _merged(name, getattr(self, name), getattr(other, name)) for name in names})

    def numbers(self) -> list[float]:
        """Return all counts as one flat list, which another rank reads with `read`."""
        values = [getattr(self, one.name) for one in fields(self)]
        return [number for one in values for number in (one.numbers() if isinstance(one, Counts) else [float(one)])]

    def read(self, numbers: Iterator[float]) -> Self:
        """Return counts of this type from what `numbers` returned for them."""
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in values.items():
            values[name] = value.read(numbers) if isinstance(value, Counts) else type(value)(next(numbers))
        return type(self)(**values)


def _merged(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, Counts):
        return one.merge(other)
    return max(one, other) if name.endswith("_max") else one + other


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStats(Counts):
    """The statistics of the policy loss; `metrics` takes the means. Divergences are KL(p || q), estimated by k3."""

    num_tokens: int = 0
    ratio_sum: float = 0.0  # pi_theta / pi_prox; with gspo, of the sequence
    ratio_max: float = 0.0
    clipped_low: float = 0.0  # tokens whose gradient the lower clip cut off; with cispo, whose weight it bounded
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    kl_proximal_policy_sum: float = 0.0
    kl_policy_reference_sum: float = 0.0
    weight_sum: float = 0.0  # pi_prox / pi_behav, bounded
    weight_square_sum: float = 0.0
    weight_max: float = 0.0  # before it is bounded
    bounded_low: float = 0.0  # tokens whose weight was below or above its bounds
    bounded_high: float = 0.0
    num_referred: int = 0  # tokens with a reference

    @classmethod
    def of(cls, tokens: LossTokens, ratio: Tensor, unbounded: Tensor, weight: Tensor, config: AlgorithmConfig) -> Self:
        """Count over `tokens`. `ratio` is what the loss clips; `weight` is the importance weight, `unbounded` before it
        was bounded. Shapes: all [M].
        """
        if len(tokens) == 0:
            return cls()
        is_bad, is_good = tokens.advantages < 0, tokens.advantages > 0
        is_cispo = config.loss == "cispo"  # which clips whatever the advantage's sign
        zero = torch.zeros_like(ratio)
        kl_ref = zero if tokens.reference is None else divergence(tokens.logprobs.detach(), tokens.reference, "k3")
        sums = {
            "ratio_sum": ratio.sum(),
            "ratio_max": ratio.max(),
            "clipped_low": ((is_bad | is_cispo) & (ratio < 1.0 - config.clip_low)).sum(),
            "clipped_high": ((is_good | is_cispo) & (ratio > 1.0 + config.clip_high)).sum(),
            "dual_clipped": zero.sum() if config.dual_clip is None else (is_bad & (ratio > config.dual_clip)).sum(),
            "kl_proximal_policy_sum": divergence(tokens.proximal, tokens.logprobs, "k3").detach().sum(),
            "kl_policy_reference_sum": kl_ref.sum(),
            "weight_sum": weight.sum(),
            "weight_square_sum": weight.square().sum(),
            "weight_max": unbounded.max(),
            "bounded_low": (unbounded < config.behavior_weight_low).sum(),
            "bounded_high": (unbounded > config.behavior_weight_high).sum(),
        }
        values = torch.stack([value.to(ratio.dtype) for value in sums.values()]).tolist()  # one transfer, not twelve
        return cls(
            num_tokens=len(tokens),
            num_referred=0 if tokens.reference is None else len(tokens),
            **dict(zip(sums, values, strict=True)),
        )

    def metrics(self) -> dict[str, float]:
        """Return means over tokens. The effective sample size is (sum w)^2 / sum w^2 / number of tokens: 1 is ideal.

        `kl_policy_reference` is present if there is a reference.
        """
        count = max(self.num_tokens, 1)
        of_reference = {"kl_policy_reference": self.kl_policy_reference_sum / max(self.num_referred, 1)}
        return {
            "ratio_mean": self.ratio_sum / count,
            "ratio_max": self.ratio_max,
            "clip_fraction_low": self.clipped_low / count,
            "clip_fraction_high": self.clipped_high / count,
            "dual_clip_fraction": self.dual_clipped / count,
            "kl_proximal_policy": self.kl_proximal_policy_sum / count,
            "behavior_weight_mean": self.weight_sum / count,
            "behavior_weight_max": self.weight_max,
            "behavior_weight_low_fraction": self.bounded_low / count,
            "behavior_weight_high_fraction": self.bounded_high / count,
            "effective_sample_size": self.weight_sum**2 / max(self.weight_square_sum, 1e-30) / count,
            **(of_reference if self.num_referred else {}),
        }


Objective = Callable[[LossTokens], Tensor]
"""The quantity to maximise for each token: [M], differentiable in `logprobs`, not weighted or aggregated."""
LossFunction = Callable[[LossTokens, AlgorithmConfig], Tensor]
"""A user's own objective, `algorithm.loss: package.module:function`: an Objective that is given the section as well."""


def choose_objective(config: AlgorithmConfig) -> Objective:
    """Return the objective that `config.loss` names. Raises ConfigError for a function that cannot be imported."""
    match config.loss:
        case "ppo_clip":
            return partial(ppo_clip, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)
        case "gspo":
            return partial(gspo, clip_low=config.clip_low, clip_high=config.clip_high)
        case "cispo":
            return partial(cispo, clip_low=config.clip_low, clip_high=config.clip_high)
        case _:
            own = cast(LossFunction, load_own(config, "loss"))
            return lambda tokens: own(tokens, config)


def policy_loss(tokens: LossTokens, config: AlgorithmConfig, objective: Objective) -> tuple[Tensor, LossStats]:
    """The loss L of this module, to be minimised, and its statistics. Shapes: LossTokens of M -> scalar."""
    unbounded = importance_weights(tokens, config.behavior_weight_level)
    values = objective(tokens)
    if is_import_path(config.loss):
        _check_own(values, tokens, config)
    weight = bounded(
        unbounded,
        low=config.behavior_weight_low,
        high=config.behavior_weight_high,
        masks=config.behavior_weight_mode == "mask",
    )
    loss = -(tokens.weights * weight * values).sum()
    if config.kl_coefficient > 0 and config.kl_in == "loss":
        has_weight = config.behavior_weight_level != "none"
        kl = reverse_kl(tokens, tokens.behavior if has_weight else tokens.proximal, cap=config.behavior_weight_high)
        loss = loss + config.kl_coefficient * (tokens.weights * kl).sum()
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * (tokens.weights * tokens.entropy).sum()
    ratio = sequence_ratio(tokens) if config.loss == "gspo" else tokens.clamped_log_ratio.exp()
    return loss, LossStats.of(tokens, ratio.detach(), unbounded, weight, config)


def _check_own(values: object, tokens: LossTokens, config: AlgorithmConfig) -> None:
    """Check a user's objective. Raises ValueError unless it can be trained."""
    if not isinstance(values, Tensor) or values.shape != tokens.logprobs.shape:
        what = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{type(values).__name__}"
        raise ValueError(
            f"loss {config.loss!r} returned {what} for {len(tokens)} loss tokens; return the objective of each token"
        )
    if tokens.logprobs.requires_grad and not values.requires_grad:
        raise ValueError(
            f"loss {config.loss!r} returned a tensor without a gradient; compute it from tokens.logprobs, not detached"
        )
    if not bool(values.isfinite().all()) and bool(tokens.logprobs.isfinite().all()):
        raise ValueError(
            f"loss {config.loss!r} returned NaN or infinity: that would spoil the whole batch; return finite numbers"
        )


def importance_weights(tokens: LossTokens, level: Literal["token", "sequence", "geometric", "none"]) -> Tensor:
    """pi_prox / pi_behav before it is bounded, which corrects for the policy that sampled. Detached.

    By `level` it is of each token; of each sequence, the product over its loss tokens, which is the exact weight of the
    sequence given its observations, or their geometric mean, whose spread does not grow with the length; or 1.
    Shapes: [M] -> [M].
    """
    log_weights = tokens.log_importance
    match level:
        case "none":
            return torch.ones_like(log_weights)
        case "token":
            pass
        case "sequence":
            log_weights = tokens.sequence_sums(log_weights)
        case "geometric":
            log_weights = tokens.sequence_means(log_weights)
    return log_weights.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded(weights: Tensor, *, low: float, high: float, masks: bool) -> Tensor:
    """Importance weights within their bounds. Shapes: [M] -> [M].

    A weight outside becomes the bound (truncated importance sampling) or, with `masks`, 0, which takes its tokens out
    of the policy's loss; the weights w_t of the others stay as they are.
    """
    if masks:
        return torch.where((weights < low) | (weights > high), 0.0, weights)
    return weights.clamp(low, high)


def ppo_clip(tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), with clip-higher (2503.14476) and dual clip (1912.09729).

    J_t = min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t),  u_t = pi_theta / pi_prox;
    with `dual_clip` c, and A_t < 0: max(J_t, c A_t), which bounds the loss of a bad token whose ratio has grown large.
    Shapes: [M] -> [M].
    """
    ratio = tokens.clamped_log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective = torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if dual_clip is None:
        return objective
    floor = torch.maximum(objective, dual_clip * tokens.advantages)
    return torch.where(tokens.advantages < 0, floor, objective)


def gspo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> Tensor:
    """GSPO (arXiv 2507.18071), in its token form: one ratio for each sequence, clipped alike for all its tokens.

    J_t = min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t),  s_t = sg[s] pi_t / sg[pi_t], s = exp(mean_t log
    pi_theta / pi_prox) over the loss tokens of a sequence: each token has the value s, and the gradient s grad log
    pi_t. With one advantage a sequence and `sequence_mean` that is the sequence form, value and gradient. A sequence is
    one branch of a rollout; tokens that branches share are in the loss and the ratio of only one. Shapes: [M] -> [M].
    """
    ratio = sequence_ratio(tokens).detach() * (tokens.logprobs - tokens.logprobs.detach()).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)


def sequence_ratio(tokens: LossTokens) -> Tensor:
    """GSPO's length-normalised ratio of each token's sequence: [M]."""
    return tokens.sequence_means(tokens.clamped_log_ratio).exp()


def cispo(tokens: LossTokens, *, clip_low: float, clip_high: float) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is clipped as a weight, and no token loses its gradient.

    J_t = sg[clip(u_t, 1 - clip_low, 1 + clip_high)] A_t log pi_theta. The gradient flows through log pi_theta alone.
    Shapes: [M] -> [M].
    """
    weight = tokens.clamped_log_ratio.exp().clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    return weight * tokens.advantages * tokens.logprobs


def reverse_kl(tokens: LossTokens, sampler: Tensor, *, cap: float) -> Tensor:
    """KL(policy || reference) of each token for the loss: its expectation has the divergence's value and its gradient.

    KL_t = rho_t k3_t,  grad KL_t = rho_t log(pi_theta / pi_ref) grad log pi_theta,  rho_t = min(pi_theta / pi_s, cap)
    with the log-probabilities `sampler` of the policy s that sampled. That is the gradient of rho_t k3_t through both
    factors (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), without the terms that cancel. Without rho_t, k3 has the
    gradient of KL(reference || policy). Estimates and log-ratio are clamped to MAX_KL. Shapes: [M] -> [M].
    """
    assert tokens.reference is not None, "a divergence needs a reference"
    policy = tokens.logprobs.detach()
    weight = (policy - sampler.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp_max(cap)
    log_ratio = (policy - tokens.reference.detach()).clamp(-MAX_KL, MAX_KL)
    value = divergence(policy, tokens.reference, "k3")
    return weight * (value + log_ratio * (tokens.logprobs - policy))


def divergence(policy: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """KL(policy || reference) of each token, estimated from log-probabilities of tokens that the policy sampled.

    Clamped to MAX_KL either way; no gradient. Shapes: [M], [M] -> [M].
    """
    assert policy.shape == reference.shape, (policy.shape, reference.shape)
    log_ratio = (reference - policy).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = {"k1": k1, "k2": k2, "k3": k3}[estimator]
    return estimate(log_ratio).clamp(-MAX_KL, MAX_KL)


def k1(log_ratio: Tensor) -> Tensor:
    """Schulman's k1 (2020), -log p/q: unbiased, of either sign, with a large variance.

    Like k2 and k3 it estimates KL(q || p), in nats, from samples of q with `log_ratio` = log p/q, element by element.
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """(log p/q)^2 / 2: biased, never negative."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """p/q - 1 - log p/q: unbiased and never negative."""
    return log_ratio.expm1() - log_ratio


def approximate_proximal(logprobs: Tensor, behavior: Tensor, versions: Tensor, start_version: int) -> Tensor:
    """Log-probabilities at the start of the step, interpolated between the sampling policy and the current one.

    log p_prox = log p_behav + a (log p_theta - log p_behav),  a = d / (d + 1),  d = start_version - version >= 0.
    Versions count steps, and the current policy is on its way to start_version + 1: a token of age 0 was sampled by the
    proximal policy itself; an old token's proximal policy is close to the current one. The idea is A-3PO's (arXiv
    2512.06547). Detached. Shapes: [M], [M], [M] -> [M].
    """
    assert logprobs.shape == behavior.shape == versions.shape, (logprobs.shape, behavior.shape, versions.shape)
    age = (start_version - versions).clamp_min(0).to(logprobs.dtype)
    return behavior + age / (age + 1.0) * (logprobs.detach() - behavior)


def value_loss(values: Tensor, old: Tensor, returns: Tensor, weights: Tensor, *, clip: float) -> tuple[Tensor, int]:
    """The clipped squared error of PPO's critic (arXiv 2005.12729, section 3), and the number of clipped tokens.

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
