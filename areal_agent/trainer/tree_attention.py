"""Attention over a row in which sequences share prefixes (algorithms/trees.py).

    q, k, v [1, H or G, N, D] ── for each block: its queries, the keys that any of them sees, a mask ──▶ [1, H, N, E]

Of a block nothing is kept for the backward pass, which computes it again: the keys of a long prefix would be kept once
for each block that sees them. On a GPU all blocks of plain causal attention are one call of FlexAttention.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from areal_agent.algorithms.trees import Block, Tree
from areal_agent.trainer.scores import Rule, Scores

TOKENS = 2
"""The dimension of queries, keys and values."""


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tree, rule: Rule | None, scores: Scores) -> Tensor:
    """Return the weighted values, with the gradients of `query`, `key`, `value` and sinks.

    Shapes: query [1, H, N, D], key [1, G, N, D], value [1, G, N, E] -> [1, H, N, E].
    """
    assert query.shape[TOKENS] == len(tree.inputs), (query.shape, len(tree.inputs))
    attended: Any = _Blocks.apply(query, key, value, scores.sinks, tree, rule, scores)
    return attended


class _Blocks(torch.autograd.Function):
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
        of_query, of_key, of_value = (torch.zeros_like(one) for one in (query, key, value))
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
            of_key.index_add_(TOKENS, keys, own[1])
            of_value.index_add_(TOKENS, keys, own[2])
            if of_sinks is not None:
                of_sinks += own[3]
        return of_query, of_key, of_value, of_sinks, None, None, None


def _seen(tree: Tree, block: Block, rule: Rule | None) -> tuple[Tensor, Tensor]:
    """Return the keys of a block and which of them each query sees, [K] and [1, 1, Q, K]."""
    keys, depths = block.keys, tree.depths[block.start : block.end]
    if rule is None:
        return keys, tree.seen(block, keys)[None, None]
    if rule.reach is not None:
        keys = keys[tree.depths[keys] > depths.min() - rule.reach]
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
        outputs: Any = attend(q, k, v, block_mask=self.mask, scale=scaling, enable_gqa=True)
        return outputs


@cache
def _compiled() -> Any:
    """Return FlexAttention as one kernel; as it stands it would hold all scores."""
    return torch.compile(flex_attention, dynamic=True)
