"""Attention over the slots, on a CPU. Knows nothing of requests, nor of the model around it.

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
    """Packed tokens `[start, stop)` are positions `[begin, begin + T)` of the sequence in `slot`."""

    slot: int
    begin: int
    start: int
    stop: int


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
            own = [one[tokens].transpose(0, 1)[None] for one in (queries, keys, values)]  # [1, heads, T, D]
            self.cache.write(layer, segment.slot, segment.begin, own[1][0], own[2][0])
            output[tokens] = self._attend_segment(layer, segment, *own)[0].transpose(0, 1)
        return output.flatten(1)

    def _attend_segment(self, layer: int, segment: Segment, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if not segment.begin:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        past = self.cache.read(layer, segment.slot, segment.slot + 1, segment.begin)
        return attend_in_parts(queries, keys, values, *past)


def attend_in_parts(queries: Tensor, keys: Tensor, values: Tensor, past_keys: Tensor, past_values: Tensor) -> Tensor:
    """Causal attention of T tokens after P others, `[1, heads, T, D]`: a fifth quicker than under a mask `[T, P + T]`.

    Softmax over two parts is the mean of both, weighed by what each adds up to (FlashAttention, Dao et al. 2022):

        o = w * o_past + (1 - w) * o_own,    w = e^past / (e^past + e^own) = sigmoid(past - own),

    `past` and `own` the log-sum-exp of the scores. Every token sees all of the past, so that part needs no mask.
    """
    shape, num_kv_heads = queries.shape, keys.shape[1]
    group = shape[1] // num_kv_heads
    grouped = queries.reshape(1, num_kv_heads, group * shape[2], shape[3])
    past, past_total = _attend(grouped, past_keys, past_values)
    own_keys, own_values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    own, own_total = _attend(queries, own_keys, own_values, is_causal=True)
    weight = torch.sigmoid(past_total.reshape(shape[:3]) - own_total).to(own.dtype)
    return torch.lerp(own, past.reshape(shape), weight[..., None])


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of the scores, `[1, heads, T]`: what the public function leaves out."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, is_causal)


def prefill_step(cache: KVCache, pieces: Sequence[tuple[int, int, int]]) -> PrefillStep:
    """The prefill of pieces `(slot, begin, T)`, packed in this order."""
    segments: list[Segment] = []
    start = 0
    for slot, begin, num_tokens in pieces:
        segments.append(Segment(slot=slot, begin=begin, start=start, stop=start + num_tokens))
        start += num_tokens
    return PrefillStep(cache=cache, segments=segments)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Slots `[start, stop)` read together up to position `width`.

    `mask` is added to the scores, `[rows, 1, 1, W]`; None where all rows are as long.
    """

    start: int
    stop: int
    width: int
    mask: Tensor | None


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
        mask = None if min(lengths[start:stop]) == width else _mask(length[start:stop], width, like)
        buckets.append(Bucket(start=start, stop=stop, width=width, mask=mask))
    return DecodeStep(cache=cache, positions=length - 1, buckets=buckets)


def _mask(length: Tensor, width: int, like: Tensor) -> Tensor:
    is_beyond = torch.arange(width, device=like.device) >= length[:, None]
    mask = torch.zeros(is_beyond.shape, device=like.device, dtype=like.dtype).masked_fill_(is_beyond, float("-inf"))
    return mask[:, None, None]


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
