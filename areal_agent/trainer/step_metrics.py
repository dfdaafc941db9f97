"""What a train step tells of itself: numbers by name, from its updates, rewards and advantages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from areal_agent.algorithms.batching import Sample
from areal_agent.trainer.critic import explained_variance
from areal_agent.trainer.group import Group
from areal_agent.trainer.step_input import StepInput
from areal_agent.trainer.tally import Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimiser update: its counts, and the norms of its gradients before clipping."""

    tally: Tally
    gradient_norm: float
    learning_rate: float
    is_skipped: bool  # the norm was not finite
    critic_gradient_norm: float | None  # None without a critic


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Token metrics over all updates; losses, gradient norms and learning rate as means over updates."""
    tally = reduce(Tally.merge, [update.tally for update in updates], Tally())
    count = max(len(updates), 1)
    return {
        **tally.metrics(),
        "loss": tally.loss / count,
        "grad_norm": sum(update.gradient_norm for update in updates) / count,
        "learning_rate": sum(update.learning_rate for update in updates) / count,
        "num_updates": sum(not update.is_skipped for update in updates),
        "num_skipped_updates": sum(update.is_skipped for update in updates),
    }


def reward_metrics(given: StepInput) -> dict[str, float]:
    """Over the rollouts that are trained; a group whose rewards are all equal has nothing to teach."""
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
    }


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Over loss tokens."""
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
    """The most memory of any rank's GPU that tensors have held; nothing on a CPU, whose memory is the process's."""
    if device.type != "cuda":
        return {}
    return {"peak_device_memory_bytes": max(group.gather([torch.cuda.max_memory_allocated(device)]))[0]}


def critic_metrics(samples: Sequence[Sample], updates: Sequence[Update]) -> dict[str, float]:
    """Of the critic at the start of the step, over loss tokens, and of its updates. Nothing without one."""
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
