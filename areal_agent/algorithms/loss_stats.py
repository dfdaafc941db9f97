"""What is worth knowing about a policy loss: sums and maxima over loss tokens, which do not depend on the split."""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.divergence import divergence, k3
from areal_agent.algorithms.loss_tokens import LossTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStats:
    """Sums over loss tokens, and maxima (`*_max`), which merge over micro-batches exactly; means come at the end."""

    num_tokens: int = 0
    ratio_sum: float = 0.0  # pi_theta / pi_prox; of the sequence with gspo
    ratio_max: float = 0.0
    clipped_low: float = 0.0  # tokens that the lower clip touched: cut off their gradient (cispo: bounded their weight)
    clipped_high: float = 0.0
    dual_clipped: float = 0.0
    kl_sum: float = 0.0  # of theta to the proximal policy, estimator k3
    kl_ref_sum: float = 0.0  # of theta to the reference, estimator k3
    weight_sum: float = 0.0  # pi_prox / pi_behav, capped
    weight_square_sum: float = 0.0
    weight_max: float = 0.0  # before the cap
    capped: float = 0.0
    num_referred: int = 0  # tokens with a reference

    @classmethod
    def of(cls, tokens: LossTokens, ratio: Tensor, uncapped: Tensor, config: AlgorithmConfig) -> Self:
        """`ratio` is what the loss clips, `uncapped` the importance weight. Shapes: [M], [M]."""
        if len(tokens) == 0:
            return cls()
        is_bad, is_good = tokens.advantages < 0, tokens.advantages > 0
        weight = uncapped.clamp_max(config.behavior_weight_cap)
        zero = torch.zeros_like(ratio)
        kl_ref = zero if tokens.reference is None else divergence(tokens.logprobs.detach(), tokens.reference, "k3")
        sums = {
            "ratio_sum": ratio.sum(),
            "ratio_max": ratio.max(),
            "clipped_low": ((is_bad | _is_cispo(config)) & (ratio < 1.0 - config.clip_low)).sum(),
            "clipped_high": ((is_good | _is_cispo(config)) & (ratio > 1.0 + config.clip_high)).sum(),
            "dual_clipped": zero.sum() if config.dual_clip is None else (is_bad & (ratio > config.dual_clip)).sum(),
            "kl_sum": k3(tokens.log_ratio.detach()).sum(),
            "kl_ref_sum": kl_ref.sum(),
            "weight_sum": weight.sum(),
            "weight_square_sum": weight.square().sum(),
            "weight_max": uncapped.max(),
            "capped": (uncapped > config.behavior_weight_cap).sum(),
        }
        values = torch.stack([value.to(ratio.dtype) for value in sums.values()]).tolist()  # one transfer, not eleven
        return cls(
            num_tokens=len(tokens),
            num_referred=0 if tokens.reference is None else len(tokens),
            **dict(zip(sums, values, strict=True)),
        )

    def merge(self, other: Self) -> Self:
        """The statistics of both together."""
        both = {one.name: (getattr(self, one.name), getattr(other, one.name)) for one in fields(self)}
        return type(self)(**{name: max(pair) if name.endswith("_max") else sum(pair) for name, pair in both.items()})

    def metrics(self) -> dict[str, float]:
        """Means a token. The effective sample size is (sum w)^2 / sum w^2 over the number of tokens: 1 is ideal.

        `kl_ref` is there when a reference is.
        """
        count = max(self.num_tokens, 1)
        return {
            "ratio_mean": self.ratio_sum / count,
            "ratio_max": self.ratio_max,
            "clip_fraction_low": self.clipped_low / count,
            "clip_fraction_high": self.clipped_high / count,
            "dual_clip_fraction": self.dual_clipped / count,
            "approx_kl": self.kl_sum / count,
            "behavior_weight_mean": self.weight_sum / count,
            "behavior_weight_max": self.weight_max,
            "behavior_weight_capped_fraction": self.capped / count,
            "effective_sample_size": self.weight_sum**2 / max(self.weight_square_sum, 1e-30) / count,
            **({"kl_ref": self.kl_ref_sum / self.num_referred} if self.num_referred else {}),
        }


def _is_cispo(config: AlgorithmConfig) -> bool:
    """Whether weights are clipped whatever the advantage's sign."""
    return config.loss == "cispo"
