"""Attention within each sequence of a packed row, in the place that transformers' models keep for it.

Each sequence is a call of its own, so none can see another, whatever transformers makes of masks and positions. Rows
that are padded are one call for all: causal attention never looks at what stands behind. It knows no micro-batch.
Shapes: B rows of T tokens, H query heads, G key-value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "areal_agent_segments"


def use_segment_attention(model: PreTrainedModel) -> None:
    """Make the model's layers call `segment_attention`; its forward passes then take `segments`.

    transformers builds no mask for a name that is registered for attention only.
    """
    AttentionInterface.register(ATTENTION_NAME, segment_attention)
    model.set_attn_implementation(ATTENTION_NAME)


def segment_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Sequence[int] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of `segments`, the lengths of the sequences in the one row; None: within each row.

    Shapes: query [B, H, T, D], key and value [B, G, T, D] -> [B, T, H, D].
    """
    lengths = list(segments or (query.shape[2],))
    assert sum(lengths) == query.shape[2], (lengths, query.shape)
    parts = zip(*(one.split(lengths, dim=2) for one in (query, key, value)), strict=True)
    outputs = [_causal(q, k, v, scaling, sliding_window) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Of one sequence a row; with `window`, no token sees further back than that many, itself included."""
    length = query.shape[2]
    if window is None or window >= length:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    everything = torch.ones(length, length, dtype=torch.bool, device=query.device)
    band = everything.tril() & everything.triu(1 - window)
    return scaled_dot_product_attention(query, key, value, attn_mask=band, scale=scaling, enable_gqa=True)
