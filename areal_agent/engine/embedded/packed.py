"""Causal attention within many sequences by one call of a kernel, for the engine's prefills and the trainer's rows.

    queries [ a a a | b b ]      a has five keys and three queries, which are its last tokens:
    keys    [ a a a a a | b b ]  the engine holds the keys of those before

The kernel is torch's `varlen_attn`, else flash-attn's. It runs on a GPU, in 16 bits. `proved` compares it with torch's
plain attention before it is used, since kernels differ in what they refuse and in how they align queries with keys.
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch 2.9
    varlen_attn = None
try:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore  # an extra of the user's, on a GPU
except ImportError:
    flash_attn_varlen_func = None

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """Where sequences lie that are packed on one axis."""

    offsets: Tensor  # [S + 1] int32: where each begins, and the last one ends
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Self:
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(offsets=offsets, longest=max(lengths))


Kernel = Callable[[Tensor, Tensor, Tensor, Spans, Spans, float], Tensor]
"""Causal attention within all sequences: queries [T, H, D], keys and values [U, G, D], the spans of queries and those
of keys, the scaling -> [T, H, D]. A sequence's queries are its last tokens."""
MAX_HEAD_SIZE = 256
"""The largest D that kernels take; they take multiples of 8."""
PROOF = ((40, 40), (1, 170), (33, 150))
"""Of the sequences of the proof: queries and keys."""
TOLERANCE = 0.03
"""Of weighted means of normally distributed values, most of which are below 1, in 16 bits."""


def takes(dtype: torch.dtype, head_size: int) -> bool:
    """Return whether kernels compute in this type and size of heads."""
    return dtype in (torch.bfloat16, torch.float16) and head_size <= MAX_HEAD_SIZE and head_size % 8 == 0


@cache
def packed_kernel(attend: Any = varlen_attn) -> Kernel | None:
    """Return torch's kernel `attend`, else flash-attn's, else None, which is logged."""
    parameters = () if attend is None else inspect.signature(attend).parameters
    if {"scale", "window_size"}.issubset(parameters):
        return partial(_by_torch, attend, {"enable_gqa": True} if "enable_gqa" in parameters else {})
    if flash_attn_varlen_func is not None:
        return _by_flash_attn
    logger.warning(
        "attention runs sequence by sequence, since torch %s has no kernel for all of them: install 2.11 or flash-attn",
        torch.__version__,
    )
    return None


def _by_torch(
    attend: Any,
    groups: dict[str, bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_queries: Spans,
    of_keys: Spans,
    scaling: float,
) -> Tensor:
    if not groups:  # torch 2.11 wants a key and a value for each query head
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    spans = (of_queries.offsets, of_keys.offsets, of_queries.longest, of_keys.longest)
    return attend(query, key, value, *spans, scale=scaling, window_size=(-1, 0), **groups)


def _by_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, of_queries: Spans, of_keys: Spans, scaling: float
) -> Tensor:
    attend: Any = flash_attn_varlen_func
    spans = (of_queries.offsets, of_keys.offsets, of_queries.longest, of_keys.longest)
    return attend(query, key, value, *spans, softmax_scale=scaling, causal=True)


@torch.inference_mode()
def proved(kernel: Kernel, *, num_heads: int, num_kv_heads: int, head_size: int, like: Tensor) -> Kernel | None:
    """Return `kernel` if it attends as torch's plain attention does, in the type and on the device of `like`.

    Else None, which is logged with its reason.
    """
    generator = torch.Generator().manual_seed(0)
    of_queries, of_keys = (Spans.of(lengths, like.device) for lengths in zip(*PROOF, strict=True))
    num_queries, num_keys = (sum(lengths) for lengths in zip(*PROOF, strict=True))
    shapes = ((num_queries, num_heads), (num_keys, num_kv_heads), (num_keys, num_kv_heads))
    q, k, v = (torch.randn(*shape, head_size, generator=generator).to(like.device, like.dtype) for shape in shapes)
    try:
        found = kernel(q, k, v, of_queries, of_keys, head_size**-0.5)
    except Exception as error:  # a boundary: kernels refuse some GPUs and sizes
        logger.warning("prompts are computed one by one, since one call for all of them fails: %s", str(error)[:300])
        return None
    queries, keys = (one.split(lengths) for one, lengths in ((q, [a for a, _ in PROOF]), (k, [b for _, b in PROOF])))
    values = v.split([b for _, b in PROOF])
    expected = torch.cat([_plainly(*one) for one in zip(queries, keys, values, strict=True)])
    difference = float((found.float() - expected).abs().max())
    if difference <= TOLERANCE:  # false for NaN
        return kernel
    logger.warning("prompts are computed one by one, since one call for all of them differs by %.2g", difference)
    return None


def _plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a kernel computes for one sequence, in float32."""
    sees = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    rows = (one.float().transpose(0, 1)[None] for one in (q, k, v))
    return scaled_dot_product_attention(*rows, attn_mask=sees, enable_gqa=True)[0].transpose(0, 1)
