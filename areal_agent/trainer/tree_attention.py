"""Attention over a row in which sequences share prefixes (algorithms/trees.py).

    q, k, v [1, H or G, N, D] ── for each block: its queries, and the keys that any of them sees ──▶ [1, H, N, E]

On a CPU plain scores go through the kernel of torch's own attention, which also returns the log-sum-exp of each query's
scores. With it a chain needs no mask: what its ancestors give and what it gives itself, causally, are merged. It is
kept for the backward pass, beside the outputs. Of other blocks nothing is kept, and the backward pass computes them
again: the keys of a long prefix would be kept once for each block that sees them. On a GPU all blocks of plain causal
attention are one call of FlexAttention.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._functorch import config as functions
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from areal_agent.algorithms.trees import Block, Tree
from areal_agent.trainer.scores import Rule, Scores

TOKENS = 2
"""The dimension of queries, keys and values."""


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tree, rule: Rule | None, scores: Scores) -> Tensor:
    """Return the weighted values, with the gradients of `query`, `key`, `value` and sinks.

    Shapes, of B rows that are all laid out as `tree`: query [B, H, N, D], key [B, G, N, D], value [B, G, N, E]
    -> [B, H, N, E].
    """
    assert query.shape[TOKENS] == len(tree.depths), (query.shape, len(tree.depths))
    is_plain = scores.is_plain and query.dtype == key.dtype == value.dtype and query.shape[3] == value.shape[3]
    if is_plain and query.device.type == "cpu" and len(query) == 1:
        attended: Any = _Kept.apply(query, key, value, tree, rule, scores.scaling)
    else:
        attended = _Recomputed.apply(query, key, value, scores.sinks, tree, rule, scores)
    return attended


class _Part(NamedTuple):
    """Keys, and which of them each query of a block sees: a mask, themselves and those before, or all."""

    keys: Tensor  # [K]
    seen: Tensor | None = None  # [1, 1, Q, K]
    is_causal: bool = False


class _Kept(torch.autograd.Function):
    """Attention that keeps outputs and log-sum-exps, by torch's operators without a public name.

    With exp(s - their sum over all parts) for weights, each part has its own share of outputs and gradients. The
    backward pass is in float32: in bfloat16 torch's takes up to four times as long for blocks of this size.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: Tree, rule: Rule | None, scaling: float
    ) -> Tensor:
        outputs, sums = torch.empty_like(query), list[Tensor]()
        for block in tree.blocks:
            queries = _by_key_head(query, block, key)
            found = [
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    queries,
                    *_of(part, queries, key, value),
                    is_causal=part.is_causal,
                    **_mask(part, query),
                    scale=scaling,
                )
                for part in _parts(tree, block, rule)
            ]
            total = torch.stack([one for _, one in found]).logsumexp(0)  # [G, H / G, Q]
            merged = sum((one * (own - total).exp()[..., None] for one, own in found), torch.zeros(()))
            outputs[0, :, block.start : block.end] = merged.flatten(0, 1)
            sums.append(total)
        ctx.save_for_backward(query, key, value, outputs, *sums)
        ctx.row = tree, rule, scaling
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, outputs, *sums = ctx.saved_tensors
        tree, rule, scaling = ctx.row
        of_query, of_key, of_value = (_sum_like(one) for one in (query, key, value))
        for block, total in zip(tree.blocks, sums, strict=True):
            exact = (_by_key_head(one, block, key).to(of_query.dtype) for one in (gradients[0], query, outputs))
            given, queries, found = exact
            for part in _parts(tree, block, rule):
                own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    given,
                    queries,
                    *(one.to(of_query.dtype) for one in _of(part, queries, key, value)),
                    found,
                    total,
                    0.0,
                    part.is_causal,
                    **_mask(part, queries),
                    scale=scaling,
                )
                of_query[0, :, block.start : block.end] += own[0].flatten(0, 1)
                of_key.index_add_(TOKENS, part.keys, own[1].sum(1, dtype=of_key.dtype)[None])
                of_value.index_add_(TOKENS, part.keys, own[2].sum(1, dtype=of_key.dtype)[None])
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _parts(tree: Tree, block: Block, rule: Rule | None) -> Iterator[_Part]:
    """A chain sees all of its ancestors and, causally, itself; of other blocks a mask says who sees whom."""
    if rule is not None or not block.is_chain:
        yield _Part(*_seen(tree, block, rule))
        return
    above, own = block.keys.tensor_split((block.start - block.end,))
    yield _Part(own, is_causal=True)
    if len(above):
        yield _Part(above)


def _by_key_head(tensor: Tensor, block: Block, key: Tensor) -> Tensor:
    """Return the queries of a block by the key-value head that they share, [1, H, N, D] -> [G, H / G, Q, D]."""
    return tensor[0, :, block.start : block.end].unflatten(0, (key.shape[1], -1))


def _of(part: _Part, queries: Tensor, *tensors: Tensor) -> Iterator[Tensor]:
    """Return keys or values of a part, which heads share without a copy, [1, G, N, D] -> [G, H / G, K, D]."""
    return (one.index_select(TOKENS, part.keys)[0, :, None].expand(-1, queries.shape[1], -1, -1) for one in tensors)


def _mask(part: _Part, query: Tensor) -> dict[str, Tensor | None]:
    """Return what is added to the scores, as the kernel's argument."""
    if part.seen is None:
        return {"attn_mask": None}
    return {"attn_mask": query.new_zeros(part.seen.shape).masked_fill_(~part.seen, float("-inf"))}


def _sum_like(tensor: Tensor) -> Tensor:
    """Return zeros to add gradients to: not in 16 bits, since hundreds of blocks may see one key."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tree: Tree,
        rule: Rule | None,
        scores: Scores,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.row = tree, rule, scores
        outputs = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=value.dtype)
        for block in tree.blocks:
            keys, seen = _seen(tree, block, rule)
            own = query[:, :, block.start : block.end]
            found = scores.attend(own, key.index_select(TOKENS, keys), value.index_select(TOKENS, keys), seen)
            outputs[:, :, block.start : block.end] = found
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks = ctx.saved_tensors
        tree, rule, scores = ctx.row
        of_query, of_key, of_value = (_sum_like(one) for one in (query, key, value))
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        for block in tree.blocks:
            keys, seen = _seen(tree, block, rule)
            places = slice(block.start, block.end)
            with torch.enable_grad():
                parts = [query[:, :, places], *(one.index_select(TOKENS, keys) for one in (key, value))]
                parts = [one.detach().requires_grad_() for one in (*parts, *([] if sinks is None else [sinks]))]
                with_sinks = scores if sinks is None else replace(scores, sinks=parts[3])
                found = with_sinks.attend(parts[0], parts[1], parts[2], seen)
            own = torch.autograd.grad(found, parts, gradients[0][:, :, places])
            of_query[:, :, places] = own[0]
            of_key.index_add_(TOKENS, keys, own[1].to(of_key.dtype))
            of_value.index_add_(TOKENS, keys, own[2].to(of_value.dtype))
            if of_sinks is not None:
                of_sinks += own[3]
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks, None, None, None


def _seen(tree: Tree, block: Block, rule: Rule | None) -> tuple[Tensor, Tensor]:
    """Return the keys of a block and which of them each query sees, [K] and [1, 1, Q, K]."""
    keys, depths = block.keys, tree.depths[block.start : block.end]
    if rule is None:
        return keys, tree.seen(block, keys)[None, None]
    if rule.reach is not None:
        keys = keys[max(0, block.num_above - rule.reach + 1) :]  # no mask: its size would have to come from the GPU
    return keys, tree.seen(block, keys) & rule.seen(depths, tree.depths[keys])


MIN_HEAD_SIZE = 16
"""The smallest heads that FlexAttention takes on a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TreeCall:
    """Plain causal attention within all sequences of a tree by one call of FlexAttention."""

    mask: BlockMask

    @classmethod
    def of(cls, tree: Tree) -> Self:
        """Return the call for a tree, which is the same in every layer."""
        ends, size = tree.ends, len(tree.ends)

        def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        # not compiled, it would hold who sees whom of the whole row
        mask = create_block_mask(sees, None, None, size, size, device=str(ends.device), _compile=ends.is_cuda)
        return cls(mask=mask)

    def takes(self, query: Tensor, value: Tensor) -> bool:
        """Return whether FlexAttention computes in these sizes."""
        return query.shape[3] == value.shape[3] >= MIN_HEAD_SIZE

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return the weighted values. Shapes: query [1, H, N, D], key and value [1, G, N, D] -> [1, H, N, D]."""
        q, k, v = (one.to(value.dtype).contiguous() for one in (query, key, value))
        attend = _compiled() if q.is_cuda else flex_attention
        with functions.patch(activation_memory_budget=1.0):  # else compiled layers would have it computed again
            outputs: Any = attend(q, k, v, block_mask=self.mask, scale=scaling, enable_gqa=True)
        return outputs


@cache
def _compiled() -> Any:
    """Return FlexAttention as one kernel; as it stands it would hold all scores."""
    return torch.compile(flex_attention, dynamic=True)
