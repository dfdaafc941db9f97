"""An objective and an advantage of one's own. The config names them by import path."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.losses import LossTokens
from areal_agent.types import TokenRecord


def smooth_clip(tokens: LossTokens, config: AlgorithmConfig) -> Tensor:
    """PPO's objective with a soft edge: the ratio u is replaced by 1 + c tanh((u - 1) / c), c its clip on that side.

    Near 1 that is u; far from it the gradient fades and is never cut off. Returns what is maximised, per token: [M].
    The trainer adds importance weights, aggregation, divergence and entropy, as the config says.
    """
    change = tokens.clamped_log_ratio.expm1()
    room = torch.where(change > 0, config.clip_high, config.clip_low)
    return (1.0 + room * torch.tanh(change / room)) * tokens.advantages


def against_half(records: Sequence[TokenRecord], rewards: Mapping[str, float], config: AlgorithmConfig) -> list[Tensor]:
    """The reward of the rollout minus one half, on every token: for rewards of 0 and 1, and groups of any size.

    Returns one value per token of each record, in order. Values at tokens outside the loss have no effect.
    """
    return [torch.full((len(record.token_ids),), rewards[record.session_id] - 0.5) for record in records]
