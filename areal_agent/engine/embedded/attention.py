"""Attention over the slots, in the place that transformers' models keep for it. Knows nothing of requests.

A step travels through the model's forward as a keyword argument and is asked once a layer, so nothing is global but
the name under which transformers finds `slot_attention`. Grouped-query attention puts the group on the query axis:
repeating keys and values is 3 to 13 times slower on a CPU.

Shapes: n rows, N packed tokens, G query heads a key-value head, H key-value heads, D head dimension, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from areal_agent.engine.embedded.kv_cache import KVCache

ATTENTION_NAME = "areal_agent_slots"

_BUCKET_ROWS = 16
_BUCKETING_GAIN = 0.75  # bucket when it reads less than this part of one read over all rows


class Step(Protocol):
    """One forward pass, as attention sees it."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Keep keys and values of the new tokens; attend. `[B, heads, T, D]` in, `[B, T, heads, D]` out."""
        ...


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Harmless when done before.

    transformers builds no mask for a name that is registered for attention only: each step brings its own.
    """
    AttentionInterface.register(ATTENTION_NAME, slot_attention)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    slot_step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a transformers attention layer calls instead of its own."""
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    return slot_step.attend(layer, query, key, value, scaling), None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens `[start, stop)` of a packed prefill are the whole sequence of `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """Whole sequences, packed on one axis without padding: only attention tells them apart."""

    cache: KVCache
    segments: Sequence[Segment]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        outputs: list[Tensor] = []
        for segment in self.segments:
            tokens = slice(segment.start, segment.stop)
            self.cache.write_prompt(layer, segment.slot, keys[0, :, tokens], values[0, :, tokens])
            outputs.append(
                scaled_dot_product_attention(
                    queries[:, :, tokens],
                    keys[:, :, tokens],
                    values[:, :, tokens],
                    is_causal=True,
                    scale=scaling,
                    enable_gqa=True,
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)  # [1, N, heads, D]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Slots `[start, stop)` read together up to position `width`. `mask` is added to the scores, `[rows, 1, 1, W]`."""

    start: int
    stop: int
    width: int
    mask: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One new token for each of the first n slots, at `positions`."""

    cache: KVCache
    positions: Tensor  # [n]
    buckets: Sequence[Bucket]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.cache.append(layer, self.positions, keys[:, :, 0], values[:, :, 0])
        num_rows, num_heads, _, head_dim = queries.shape
        grouped = queries.view(num_rows, keys.shape[1], -1, head_dim)  # [n, H, G, D]
        outputs = [self._attend_bucket(layer, grouped, bucket, scaling) for bucket in self.buckets]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(num_rows, 1, num_heads, head_dim)

    def _attend_bucket(self, layer: int, grouped: Tensor, bucket: Bucket, scaling: float) -> Tensor:
        keys, values = self.cache.read(layer, bucket.start, bucket.stop, bucket.width)
        rows = grouped[bucket.start : bucket.stop]
        return scaled_dot_product_attention(rows, keys, values, attn_mask=bucket.mask, scale=scaling)


def decode_step(cache: KVCache, lengths: Sequence[int], *, device: torch.device, dtype: torch.dtype) -> DecodeStep:
    """The decode of rows that have `lengths` tokens, the new one included."""
    length = torch.tensor(lengths, device=device)
    buckets: list[Bucket] = []
    for start, stop in bucket_rows(lengths):
        width = max(lengths[start:stop])
        is_beyond = torch.arange(width, device=device) >= length[start:stop, None]
        mask = torch.zeros(is_beyond.shape, device=device, dtype=dtype).masked_fill_(is_beyond, float("-inf"))
        buckets.append(Bucket(start=start, stop=stop, width=width, mask=mask[:, None, None]))
    return DecodeStep(cache=cache, positions=length - 1, buckets=buckets)


def bucket_rows(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut the rows where reading each part only up to its own longest row pays.

    >>> bucket_rows([100] * 32)
    [(0, 32)]
    >>> bucket_rows([1000] * 16 + [10] * 16)
    [(0, 16), (16, 32)]
    """
    num_rows = len(lengths)
    parts = [(start, min(start + _BUCKET_ROWS, num_rows)) for start in range(0, num_rows, _BUCKET_ROWS)]
    read_in_parts = sum((stop - start) * max(lengths[start:stop]) for start, stop in parts)
    return parts if read_in_parts < _BUCKETING_GAIN * num_rows * max(lengths) else [(0, num_rows)]
