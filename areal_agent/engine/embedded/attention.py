"""Attention over the slots. Knows nothing of requests, nor of the model around it.

Grouped-query attention puts the group on the query axis: repeating keys and values is 3 to 13 times slower on a CPU.

Shapes: n rows, N packed tokens, T tokens of one piece, Q query heads, H key-value heads, G = Q / H, D head dimension,
W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_agent.engine.embedded.kv_cache import KVCache

_BUCKET_ROWS = 16
_BUCKETING_GAIN = 0.75  # bucket when it reads less than this part of one read over all rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Packed tokens `[start, stop)` are positions `[begin, begin + T)` of the sequence in `slot`.

    `mask` is added to the scores, `[T, begin + T]`; None where plain
    causality will do, because the piece begins its sequence.
    """

    slot: int
    begin: int
    start: int
    stop: int
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """Pieces of sequences, packed on one axis without padding: only attention tells them apart."""

    cache: KVCache
    segments: Sequence[Segment]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[N, heads, D]` in, `[N, Q * D]` out."""
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for segment in self.segments:
            tokens = slice(segment.start, segment.stop)
            own_keys, own_values = keys[tokens].transpose(0, 1), values[tokens].transpose(0, 1)
            self.cache.write(layer, segment.slot, segment.begin, own_keys, own_values)
            if segment.begin:
                end = segment.begin + segment.stop - segment.start
                own_keys, own_values = (one[0] for one in self.cache.read(layer, segment.slot, segment.slot + 1, end))
            output[tokens] = scaled_dot_product_attention(
                queries[tokens].transpose(0, 1)[None],
                own_keys[None],
                own_values[None],
                attn_mask=segment.mask,
                is_causal=segment.mask is None,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return output.flatten(1)


def prefill_step(cache: KVCache, pieces: Sequence[tuple[int, int, int]], *, like: Tensor) -> PrefillStep:
    """The prefill of pieces `(slot, begin, T)`, packed in this order; `like` has the model's device and dtype."""
    segments: list[Segment] = []
    start = 0
    for slot, begin, num_tokens in pieces:
        mask = None
        if begin:
            mask = torch.full(
                (num_tokens, begin + num_tokens), float("-inf"), device=like.device, dtype=like.dtype
            ).triu_(begin + 1)
        segments.append(Segment(slot=slot, begin=begin, start=start, stop=start + num_tokens, mask=mask))
        start += num_tokens
    return PrefillStep(cache=cache, segments=segments)


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

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[n, heads, D]` in, `[n, Q * D]` out."""
        self.cache.append(layer, self.positions, keys, values)
        num_rows, num_kv_heads, head_dim = keys.shape
        grouped = queries.view(num_rows, num_kv_heads, -1, head_dim)  # [n, H, G, D]
        outputs = [self._attend_bucket(layer, grouped, bucket) for bucket in self.buckets]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(num_rows, -1)

    def _attend_bucket(self, layer: int, grouped: Tensor, bucket: Bucket) -> Tensor:
        keys, values = self.cache.read(layer, bucket.start, bucket.stop, bucket.width)
        return scaled_dot_product_attention(grouped[bucket.start : bucket.stop], keys, values, attn_mask=bucket.mask)


def decode_step(cache: KVCache, lengths: Sequence[int], *, like: Tensor) -> DecodeStep:
    """The decode of rows that have `lengths` tokens, the new one included; `like` has the model's device and dtype."""
    length = torch.tensor(lengths, device=like.device)
    buckets: list[Bucket] = []
    for start, stop in bucket_rows(lengths):
        width = max(lengths[start:stop])
        is_beyond = torch.arange(width, device=like.device) >= length[start:stop, None]
        mask = torch.zeros(is_beyond.shape, device=like.device, dtype=like.dtype).masked_fill_(is_beyond, float("-inf"))
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
