"""The forward pass of a dense decoder in few operations, for Llama, Mistral, Qwen2 and Qwen3, and its attention.

    h <- embed(ids)
    h <- h + o(attend(rope(q), rope(k), v))     (q, k, v) = qkv(rms(h)), for Qwen3 with q and k normalised by head
    h <- h + down(silu(gate) * up)              (gate, up) = gate_up(rms(h)); both lines once per layer
    h <- rms(h)

The weights stay parameters of transformers' model, under their names. Weights that multiply the same input lie side by
side in one tensor, and the parameters are views of it, so copying into a parameter changes the product; on a CPU, of
a large model, once it is packed again.

Attention reads the cache's slots with torch's `scaled_dot_product_attention`. It puts a group of query heads on the
query axis: repeating keys and values is 3 to 13 times slower on a CPU.

Shapes: n rows, N packed tokens, T tokens of one piece, E hidden size, Q query heads, H key-value heads, G = Q / H,
D head dimension, W width, P past tokens.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from areal_agent.dtype import LARGE
from areal_agent.engine.embedded.kv_cache import Ids, KVCache, KVShape
from areal_agent.engine.embedded.packed import Kernel, Spans

PACKED_ROWS = 64
"""Rows for which packed weights lie best. With 1 to 512 rows of SmolLM2's shapes, no other layout was faster."""


class StepGivenUp(Exception):
    """Raised when a forward pass was told to stop: the keys and values of its tokens are incomplete."""


class _Linear:
    """A product. Once packed it reads a copy of the weights: after they have changed it has to be packed again."""

    def __init__(self, *parts: nn.Linear) -> None:
        """Join layers of the same input into one product. The layers keep their parameters, as views."""
        biases = [cast(Any, part).bias for part in parts]
        self.weight = _side_by_side([part.weight for part in parts])  # [out, in]
        self.bias = None if biases[0] is None else _side_by_side(biases)
        self._packed: Tensor | None = None

    def pack(self) -> None:
        """Copy the weights, in the blocks in which a CPU's products read them (oneDNN)."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), PACKED_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def added_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        """Return `hidden + self(x)`, without a bias rounded once. `hidden` may be overwritten."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, hidden, self._packed, self.bias, "add")
        hidden.addmm_(x, self.weight.t())
        return hidden if self.bias is None else hidden.add_(self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32 (Zhang and Sennrich 2019)."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "_Norm":
        norm = cast(Any, module)
        return cls(weight=norm.weight, eps=norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return normalised(x, self.weight, self.eps)


def normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, as a new tensor, in float32 and rounded once."""
    if x.is_cuda:  # one kernel
        return rms_norm(x, x.shape[-1:], weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scaled = x * norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (scaled if weight is None else scaled.mul_(weight)).to(x.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    input_norm: _Norm
    qkv: _Linear
    output: _Linear
    mlp_norm: _Norm
    gate_up: _Linear
    down: _Linear

    @classmethod
    def of(cls, module: nn.Module) -> "_Layer":
        layer = cast(Any, module)
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            input_norm=_Norm.of(layer.input_layernorm),
            qkv=_Linear(attention.q_proj, attention.k_proj, attention.v_proj),
            output=_Linear(attention.o_proj),
            mlp_norm=_Norm.of(layer.post_attention_layernorm),
            gate_up=_Linear(mlp.gate_proj, mlp.up_proj),
            down=_Linear(mlp.down_proj),
        )


class _HeadNorms:
    """The norms of queries and keys of all layers. A value is in no norm."""

    def __init__(self, attentions: Sequence[Any], num_heads: int, num_kv_heads: int) -> None:
        norms = [norm for attention in attentions for norm in (attention.q_norm, attention.k_norm)]
        self.eps: float = norms[0].variance_epsilon
        self._weights = _side_by_side([norm.weight for norm in norms]).view(len(attentions), 2, -1)  # [L, 2, D]
        of_heads = torch.arange(num_heads + num_kv_heads, device=self._weights.device)
        self._kinds = (of_heads >= num_heads).long()  # [Q + H], 0 for a query

    def weights(self) -> Sequence[Tensor]:
        """The weight of each rotated head, `[Q + H, D]` for each layer, as they are now."""
        return self._weights[:, self._kinds].unbind()


class Decoder:
    """The weights of a transformers model and the forward pass over them. It never calls the model itself."""

    def __init__(self, model: PreTrainedModel, *, max_positions: int) -> None:
        config, inner = model.config, cast(Any, model).model
        self.num_heads: int = config.num_attention_heads
        self.kv_shape = KVShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=inner.layers[0].self_attn.head_dim,
        )
        self._embedding: Tensor = inner.embed_tokens.weight
        self._layers = [_Layer.of(layer) for layer in inner.layers]
        self.dtype = self._layers[0].qkv.weight.dtype  # of the layers, of keys and of values
        self._norm = _Norm.of(inner.norm)
        attentions = [layer.self_attn for layer in inner.layers]
        self._head_norms = None
        if hasattr(attentions[0], "q_norm"):
            self._head_norms = _HeadNorms(attentions, self.num_heads, self.kv_shape.num_kv_heads)
        self._rotations = _rotations(inner.rotary_emb, max_positions, like=self._layers[0].qkv.weight)
        self._head = _Linear(cast(Any, model).lm_head)
        self.is_packed = config.hidden_size >= LARGE and self._head.weight.device.type == "cpu" and can_pack(self.dtype)
        self.pack()

    def pack(self) -> None:
        """Compute with the weights as they are now, if they are packed; call it when they have changed."""
        if self.is_packed:
            for layer in self._layers:
                for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
                    product.pack()
            self._head.pack()

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        step: "PrefillStep | PackedPrefillStep | DecodeStep | ScoringStep",
        *,
        unneeded: threading.Event,
    ) -> Tensor:
        """The last hidden states `[N, E]` of tokens `[N]` at `positions` `[N]` of their sequences.

        Raises StepGivenUp, between two layers, once `unneeded` is set.
        """
        hidden = embedding(ids, self._embedding).to(self.dtype)
        cos, sin = self._rotations[positions].unbind(1)  # [N, 1, D] each
        norms = self._head_norms
        head_weights = [None] * len(self._layers) if norms is None else norms.weights()
        for number, layer in enumerate(self._layers):
            if unneeded.is_set():
                raise StepGivenUp
            queries, kv = self._project(layer.qkv(layer.input_norm(hidden)), head_weights[number], cos, sin)
            hidden = layer.output.added_to(hidden, step.attend(number, queries, kv))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = layer.down.added_to(hidden, silu(gate).mul_(up))
        return self._norm(hidden.to(self._head.weight.dtype))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits of the next token, `[n, V]` float32; in `out` if it is given."""
        computed = self._head(hidden)
        return computed.float() if out is None else out.copy_(computed)

    def _project(self, x: Tensor, head_weight: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and rotate queries and keys, side by side in `x` `[N, (Q + 2H) * D]` with the values, in place.

        Returns views of them: queries `[N, Q, D]`, and keys and values `[N, 2, H, D]`.
        """
        num_heads, num_kv_heads, head_dim = self.num_heads, self.kv_shape.num_kv_heads, self.kv_shape.head_dim
        num_rotated = num_heads + num_kv_heads
        heads = x.view(len(x), num_rotated + num_kv_heads, head_dim)
        plain = heads
        if self._head_norms is not None and head_weight is not None:
            plain = normalised(heads, None, self._head_norms.eps)  # values too: a part would be copied before
            plain[:, :num_rotated].mul_(head_weight)
        turned = plain.roll(head_dim // 2, -1)[:, :num_rotated]  # of all, for the same reason
        torch.addcmul(plain[:, :num_rotated] * cos, turned, sin, out=heads[:, :num_rotated])
        return heads[:, :num_heads], heads[:, num_heads:].unflatten(1, (2, num_kv_heads))


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this machine's processor has products of this type over packed weights."""
    is_there = torch.backends.mkldnn.is_available()
    return is_there and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.detach() for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


def _rotations(rotary: nn.Module, max_positions: int, *, like: Tensor) -> Tensor:
    """Cosines and sines of every position, `[P, 2, 1, D]`.

    rotate_half(x) is roll(x) with its first half negated; that sign is folded into the sines.
    """
    positions = torch.arange(max_positions, device=like.device)[None]
    with torch.inference_mode():
        cos, sin = rotary(like, positions)
        sin[..., : sin.shape[-1] // 2].neg_()
        return torch.stack([cos[0], sin[0]], dim=1)[:, :, None]


_BUCKET_ROWS = 16
_BUCKETING_GAIN = 0.75  # bucket when it reads less than this part of one read over all rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens of one sequence whose keys and values are to be computed: positions `[begin, begin + T)` in `slot`."""

    slot: int
    begin: int
    ids: Ids  # [T]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """A prefill of pieces packed on one axis without padding; only attention separates them."""

    cache: KVCache
    pieces: Sequence[Piece]
    masks: Sequence[Tensor | None]  # which positions each token of a piece sees, [T, begin + T]; None: needs none

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Store keys and values of the new tokens, `[N, 2, H, D]`, and attend: queries `[N, Q, D]` -> `[N, Q * D]`."""
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        keys, values = kv.unbind(1)
        stop = 0
        for piece, mask in zip(self.pieces, self.masks, strict=True):
            start, stop = stop, stop + len(piece.ids)
            own = [one[start:stop].transpose(0, 1)[None] for one in (queries, keys, values)]  # [1, heads, T, D]
            self.cache.write(layer, piece.slot, piece.begin, own[1][0], own[2][0])
            output[start:stop] = self._attend_piece(layer, piece, mask, *own)[0].transpose(0, 1)
        return output.flatten(1)

    def _attend_piece(
        self, layer: int, piece: Piece, mask: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        if not piece.begin:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        if mask is None:
            past = self.cache.read(layer, piece.slot, piece.slot + 1, piece.begin)
            return attend_in_parts(queries, keys, values, *past)
        every = self.cache.read(layer, piece.slot, piece.slot + 1, mask.shape[1])
        return attend_under_mask(queries, *every, mask)


def attend_in_parts(queries: Tensor, keys: Tensor, values: Tensor, past_keys: Tensor, past_values: Tensor) -> Tensor:
    """Causal attention of T tokens after P others, `[1, heads, T, D]`: a fifth faster than with a mask `[T, P + T]`.

    Softmax over two parts is their mean, weighted by the sum of each part (FlashAttention, Dao et al. 2022):

        o = w * o_past + (1 - w) * o_own,    w = e^past / (e^past + e^own) = sigmoid(past - own),

    where `past` and `own` are log-sum-exps of scores. Every token sees all of the past, so that part needs no mask.
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
    """Attention with the log-sum-exp of the scores, `[1, heads, T]`, which the public function does not return."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, is_causal)


def attend_under_mask(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute the same with all keys `[1, H, P + T, D]` under a mask `[T, P + T]` of what each token sees.

    For GPUs, where torch has no kernel that returns the log-sum-exp in every float type. The heads of a group read the
    same keys and values without repeating them in memory, since torch's fast kernels take either groups or a mask.
    """
    num_heads, num_kv_heads = queries.shape[1], keys.shape[1]
    grouped = queries.reshape(num_kv_heads, num_heads // num_kv_heads, *queries.shape[2:])  # [H, G, T, D]
    keys, values = (one.transpose(0, 1).expand(-1, grouped.shape[1], -1, -1) for one in (keys, values))
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)


def prefill_step(cache: KVCache, pieces: Sequence[Piece], *, in_parts: bool) -> PrefillStep:
    """Prepare a prefill of pieces, packed in this order. Those with a past attend `in_parts` (CPU only) or by mask."""
    masks = [
        None if in_parts or not piece.begin else causal_mask(len(piece.ids), piece.begin, cache.device)
        for piece in pieces
    ]
    return PrefillStep(cache=cache, pieces=pieces, masks=masks)


def causal_mask(num_tokens: int, num_past: int, device: torch.device) -> Tensor:
    """The mask `[T, P + T]` by which each of T tokens sees the P before them, and those among them up to itself.

    >>> causal_mask(2, 1, torch.device("cpu")).tolist()
    [[True, True, False], [True, True, True]]
    """
    return torch.ones(num_tokens, num_past + num_tokens, dtype=torch.bool, device=device).tril_(num_past)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedPrefillStep:
    """The same prefill with one call of a kernel for all pieces, on a GPU. Shapes: U tokens of all slots' pieces."""

    cache: KVCache
    kernel: Kernel
    own: tuple[Tensor, Tensor]  # slots and positions of the new tokens, each [N]
    every: tuple[Tensor, Tensor]  # and of all tokens that they see, each [U]
    spans: tuple[Spans, Spans]  # of both

    @classmethod
    def of(cls, cache: KVCache, kernel: Kernel, pieces: Sequence[Piece]) -> Self:
        """Prepare a prefill of pieces, packed in this order."""
        begins, ends = [piece.begin for piece in pieces], [piece.begin + len(piece.ids) for piece in pieces]
        slots = [piece.slot for piece in pieces]

        def tokens(firsts: Sequence[int]) -> tuple[tuple[Tensor, Tensor], Spans]:
            lengths = [end - first for first, end in zip(firsts, ends, strict=True)]
            positions = np.concatenate([np.arange(*span) for span in zip(firsts, ends, strict=True)])
            places = np.stack([np.repeat(slots, lengths), positions])
            of_slots, of_positions = torch.from_numpy(places).to(cache.device)
            return (of_slots, of_positions), Spans.of(lengths, cache.device)

        (own, of_own), (every, of_every) = tokens(begins), tokens([0] * len(pieces))
        return cls(cache=cache, kernel=kernel, own=own, every=every, spans=(of_own, of_every))

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Store keys and values of the new tokens, `[N, 2, H, D]`, and attend: queries `[N, Q, D]` -> `[N, Q * D]`."""
        self.cache.put(layer, *self.own, kv)
        keys, values = self.cache.get(layer, *self.every).unbind(1)
        return self.kernel(queries, keys, values, *self.spans, queries.shape[-1] ** -0.5).flatten(1)


class ScoringStep:
    """One whole sequence, whose keys and values nobody needs afterwards: none are stored."""

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Attend causally: queries `[T, Q, D]`, keys and values `[T, 2, H, D]` -> `[T, Q * D]`."""
        q, k, v = (one.transpose(0, 1)[None] for one in (queries, *kv.unbind(1)))  # [1, heads, T, D]
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Slots `[start, stop)`, read together up to position `width`.

    `mask` is added to the scores, `[rows, 1, 1, W]`; None where all rows have the same length.
    """

    start: int
    stop: int
    width: int
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """A decode step: one new token for each of the first n slots, at `positions`."""

    cache: KVCache
    slots: Tensor  # [n]
    positions: Tensor  # [n]
    buckets: Sequence[Bucket]

    @classmethod
    def of(cls, cache: KVCache, positions: Tensor, buckets: Sequence[Bucket]) -> Self:
        """Return the step of the first rows."""
        return cls(cache=cache, slots=cache.slots[: len(positions)], positions=positions, buckets=buckets)

    def attend(self, layer: int, queries: Tensor, kv: Tensor) -> Tensor:
        """Store keys and values of the new tokens, `[n, 2, H, D]`, and attend: queries `[n, Q, D]` -> `[n, Q * D]`."""
        self.cache.put(layer, self.slots, self.positions, kv)
        num_rows, _, num_kv_heads, head_dim = kv.shape
        grouped = queries.view(num_rows, num_kv_heads, -1, head_dim)  # [n, H, G, D]
        outputs = [self._attend_bucket(layer, grouped, bucket) for bucket in self.buckets]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(num_rows, -1)

    def _attend_bucket(self, layer: int, grouped: Tensor, bucket: Bucket) -> Tensor:
        keys, values = self.cache.read(layer, bucket.start, bucket.stop, bucket.width)
        return scaled_dot_product_attention(grouped[bucket.start : bucket.stop], keys, values, attn_mask=bucket.mask)


def decode_step(cache: KVCache, lengths: Sequence[int]) -> DecodeStep:
    """Prepare a decode step of the first n rows; `lengths` count the new token."""
    length = torch.tensor(lengths, device=cache.device)
    buckets: list[Bucket] = []
    for start, stop in bucket_rows(lengths):
        width = max(lengths[start:stop])
        mask = None if min(lengths[start:stop]) == width else length_mask(length[start:stop], width, cache.dtype)
        buckets.append(Bucket(start=start, stop=stop, width=width, mask=mask))
    return DecodeStep.of(cache, length - 1, buckets)


def length_mask(length: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of n rows of these lengths `[n]`: minus infinity beyond them, `[n, 1, 1, W]`."""
    is_beyond = torch.arange(width, device=length.device) >= length[:, None]
    mask = torch.zeros(is_beyond.shape, device=length.device, dtype=dtype).masked_fill_(is_beyond, float("-inf"))
    return mask[:, None, None]


def bucket_rows(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Split the rows into buckets, each read up to its own longest row, where that saves enough.

    >>> bucket_rows([100] * 32)
    [(0, 32)]
    >>> bucket_rows([1000] * 16 + [10] * 16)
    [(0, 16), (16, 32)]
    """
    num_rows = len(lengths)
    parts = [(start, min(start + _BUCKET_ROWS, num_rows)) for start in range(0, num_rows, _BUCKET_ROWS)]
    read_in_parts = sum((stop - start) * max(lengths[start:stop]) for start, stop in parts)
    return parts if read_in_parts < _BUCKETING_GAIN * num_rows * max(lengths) else [(0, num_rows)]
