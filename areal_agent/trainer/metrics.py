"""The metrics of a train step: numbers by name, from its updates, rewards and advantages.

The counts are sums and maxima over micro-batches, so they do not depend on how a step is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from areal_agent.algorithms.batching import MicroBatch, Sample
from areal_agent.algorithms.losses import Counts, LossStats, divergence
from areal_agent.algorithms.trees import in_order
from areal_agent.trainer.ranks import Group
from areal_agent.trainer.wire import StepInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch(Counts):
    """The difference between the trainer's log-probabilities at the start of a step and the engine's.

    Over all tokens this includes the drift of the policy since they were sampled. Over *fresh* tokens, sampled by the
    very weights that the step starts from, only numerical differences remain.
    """

    num_tokens: int = 0
    diff_sum: float = 0.0  # |proximal - behaviour|, nats
    diff_max: float = 0.0
    kl_sum: float = 0.0  # KL(behaviour || proximal), estimator k3
    num_fresh: int = 0
    fresh_diff_sum: float = 0.0
    fresh_diff_max: float = 0.0

    @classmethod
    def of(cls, proximal: Tensor, behavior: Tensor, is_fresh: Tensor) -> Self:
        """Compare the two log-probabilities of each token. Shapes: all [M]."""
        if len(proximal) == 0:
            return cls()
        diff = (proximal - behavior).abs()
        fresh_diff = torch.where(is_fresh, diff, 0.0)
        kl = divergence(behavior, proximal, "k3")
        values = [diff.sum(), diff.max(), kl.sum(), is_fresh.sum(), fresh_diff.sum(), fresh_diff.max()]
        diff_sum, diff_max, kl_sum, num_fresh, fresh_diff_sum, fresh_diff_max = torch.stack(values).tolist()
        return cls(
            num_tokens=len(proximal),
            diff_sum=diff_sum,
            diff_max=diff_max,
            kl_sum=kl_sum,
            num_fresh=round(num_fresh),
            fresh_diff_sum=fresh_diff_sum,
            fresh_diff_max=fresh_diff_max,
        )

    def metrics(self) -> dict[str, float]:
        count = max(self.num_tokens, 1)
        return {
            "logp_diff_mean": self.diff_sum / count,
            "logp_diff_max": self.diff_max,
            "logp_diff_fresh_mean": self.fresh_diff_sum / max(self.num_fresh, 1),
            "logp_diff_fresh_max": self.fresh_diff_max,
            "num_fresh_tokens": self.num_fresh,
            "kl_behavior_proximal": self.kl_sum / count,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally(Counts):
    """The counts of one or more micro-batches."""

    loss: float = 0.0
    entropy_sum: float = 0.0
    num_input_tokens: int = 0  # of all sequences, without padding
    num_shared_tokens: int = 0  # those of them that had no position of their own
    num_positions: int = 0  # computed, with padding
    num_micro_batches: int = 0
    num_operations: float = 0.0  # of the models, forward and backward
    value_loss: float = 0.0
    num_clipped_values: int = 0
    losses: LossStats = field(default_factory=LossStats)
    mismatch: Mismatch = field(default_factory=Mismatch)

    def metrics(self) -> dict[str, float]:
        """Return means over tokens, by name. Losses are left out: they add up over the micro-batches of an update."""
        padding = self.num_positions - (self.num_input_tokens - self.num_shared_tokens)
        return {
            "entropy": self.entropy_sum / max(self.losses.num_tokens, 1),
            "num_loss_tokens": self.losses.num_tokens,
            "num_input_tokens": self.num_input_tokens,
            "num_micro_batches": self.num_micro_batches,
            "padding_fraction": padding / max(self.num_positions, 1),
            "shared_positions": self.num_shared_tokens,
            **self.losses.metrics(),
            **self.mismatch.metrics(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimiser update: its counts, and the norms of its gradients before clipping."""

    tally: Tally
    gradient_norm: float
    gradient_clip: float
    learning_rate: float
    critic_gradient_norm: float | None  # None without a critic

    @property
    def is_skipped(self) -> bool:
        return not np.isfinite(self.gradient_norm)

    @property
    def is_empty(self) -> bool:
        return self.gradient_norm == 0.0


def update_metrics(updates: Sequence[Update], sequences: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Return token metrics over all updates, and means over the updates: loss, gradient norm, clip, learning rate.

    `sequences` are the tokens of each update, [T] each. Positions of which an update computed some twice are repeated.
    """
    tally = reduce(Tally.merge, [update.tally for update in updates], Tally())
    count = max(len(updates), 1)
    shareable = sum(sum(in_order(one)[1]) for one in sequences)
    return {
        **tally.metrics(),
        "repeated_positions": shareable - tally.num_shared_tokens,
        "loss": tally.loss / count,
        "grad_norm": sum(update.gradient_norm for update in updates) / count,
        "grad_clip": sum(update.gradient_clip for update in updates) / count,
        "learning_rate": sum(update.learning_rate for update in updates) / count,
        "num_updates": sum(not (update.is_skipped or update.is_empty) for update in updates),
        "num_empty_updates": sum(update.is_empty for update in updates),
        "num_skipped_updates": sum(update.is_skipped for update in updates),
    }


def reward_metrics(given: StepInput) -> dict[str, float]:
    """Return reward metrics over the trained rollouts. A group of equal rewards is flat: it teaches nothing."""
    by_group: dict[str, dict[str, float]] = {}
    for record in given.records:
        by_group.setdefault(record.group_id, {})[record.session_id] = given.rewards[record.session_id]
    rewards = [reward for group in by_group.values() for reward in group.values()]
    flat = sum(len(set(group.values())) == 1 for group in by_group.values())
    return {
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "flat_group_fraction": flat / max(len(by_group), 1),
        "num_rollouts": len(rewards),
        "num_records": len(given.records),
        "num_truncated_records": sum(bool(record.truncated[-1]) for record in given.records),
    }


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the statistics of the advantages over all loss tokens."""
    of_samples = [sample.advantages for sample in samples if sample.advantages is not None and sample.num_loss_tokens]
    if not of_samples:
        return dict.fromkeys(("advantage_mean", "advantage_std", "advantage_min", "advantage_max"), 0.0)
    advantages = torch.cat(of_samples).double()
    return {
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
        "advantage_min": float(advantages.min()),
        "advantage_max": float(advantages.max()),
    }


def device_memory(device: torch.device, group: Group) -> dict[str, float]:
    """Return the peak GPU memory of the rank that used most. Empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {"peak_device_memory_bytes": max(group.gather([torch.cuda.max_memory_allocated(device)]))[0]}


PEAK_TFLOPS = {"H100 PCIe": 756, "NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362}
"""Dense products in bfloat16 by data sheet, in 1e12 operations a second, by what a GPU's name has; the first counts."""


def peak_rate(device: torch.device) -> float | None:
    """Return how many operations a second a GPU can do in bfloat16; None for a CPU and for a GPU that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((1e12 * rate for known, rate in PEAK_TFLOPS.items() if known in name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The operations of a forward and backward pass. Neither recomputation nor windows are looked at.

    For each token, a weight takes 2 forward, 2 for the gradient of its input and, if it is trained, 2 for its own; the
    output layer's are those of the loss tokens. A token and one that it sees take 12 for each number of a query: 2
    forward and 4 backward in the product with the key, and as many in that with the value.
    """

    of_token: float
    of_loss_token: float
    of_pair: float

    @classmethod
    def of(cls, layers: Sequence[nn.Module], config: Any, *, num_outputs: int, is_head_trained: bool = True) -> Self:
        """Count those of a decoder's layers, of which `config` is a text model's, and of an output layer."""
        of_token, num_used = 0.0, getattr(config, "num_experts_per_tok", None)
        for weight in (one for layer in layers for one in layer.parameters() if one.ndim > 1):
            share = num_used / len(weight) if num_used and weight.ndim == 3 else 1.0  # experts are in one tensor
            of_token += share * (6 if weight.requires_grad else 4) * weight.numel()
        num_heads = getattr(config, "num_attention_heads", 0)
        head_size = getattr(config, "head_dim", None) or config.hidden_size // max(num_heads, 1)
        return cls(
            of_token=of_token,
            of_loss_token=(6 if is_head_trained else 4) * num_outputs * config.hidden_size,
            of_pair=12.0 * len(layers) * num_heads * head_size,
        )

    def count(self, batch: MicroBatch) -> float:
        """Return the operations of a micro-batch; padding is none, and prefixes in a tree are computed once."""
        num_tokens = batch.num_input_tokens - batch.num_shared_tokens
        of_layers = self.of_token * num_tokens + self.of_pair * batch.num_pairs
        return of_layers + self.of_loss_token * batch.num_loss_tokens


def mfu_metrics(updates: Sequence[Update], seconds: float, device: torch.device, group: Group) -> dict[str, float]:
    """Return the share of all ranks' peak rate that the updates of `seconds` reached. Empty where that is not known."""
    peak = peak_rate(device)
    done = sum(one.tally.num_operations for one in updates)
    return {} if peak is None else {"mfu": done / (seconds * group.size * peak)}


def critic_metrics(samples: Sequence[Sample], updates: Sequence[Update]) -> dict[str, float]:
    """Return metrics of the critic at the start of the step and of its updates. Empty without a critic."""
    values = [one.values for one in samples if one.values is not None]
    returns = [one.returns for one in samples if one.returns is not None]
    if not values or not returns:
        return {}
    count = max(len(updates), 1)
    num_tokens = max(sum(one.tally.losses.num_tokens for one in updates), 1)
    return {
        "value_loss": sum(one.tally.value_loss for one in updates) / count,
        "value_clip_fraction": sum(one.tally.num_clipped_values for one in updates) / num_tokens,
        "value_explained_variance": explained_variance(torch.cat(values).double(), torch.cat(returns).double()),
        "critic_grad_norm": sum(one.critic_gradient_norm or 0.0 for one in updates) / count,
    }


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that knows the mean. 0 if all returns are equal.

    Shapes: [N], [N] -> scalar.
    """
    assert values.shape == returns.shape, (values.shape, returns.shape)
    if len(returns) == 0:
        return 0.0
    spread = float(returns.var(correction=0))
    return 1.0 - float(torch.var(returns - values, correction=0)) / spread if spread > 0 else 0.0
