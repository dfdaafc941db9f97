"""Attention over packed sequences, called by transformers' own models.

transformers calls attention by a name, and under that name also a function that gets the rule by which tokens see each
other. With both registered a model keeps its own code: it makes queries, keys and values and says its scaling, soft
cap, sinks and rule (causal, a sliding window, chunks), which are applied here to each packed sequence alone.

    model ── rule ───────────────▶ `mask_rule`: None for plain causal attention, else a `Rule`
          ── q, k, v, the rule ──▶ `segment_attention`
                                       plain causal on a GPU: one call for all sequences (`OneCall`, `TreeCall`)
                                       plain causal:          one call of torch's attention for each sequence
                                       else, and in trees:    blocks of queries, each with the keys in reach
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from areal_agent.algorithms.trees import Tree
from areal_agent.engine.embedded.packed import Kernel, Spans, takes
from areal_agent.errors import ConfigError
from areal_agent.trainer.context import Context
from areal_agent.trainer.scores import Rule, Scores, mask_rule
from areal_agent.trainer.tree_attention import TreeCall, tree_attention

ATTENTION_NAME = "areal_agent_segments"


def use_segment_attention(model: PreTrainedModel) -> None:
    """Make the model's layers call `segment_attention`, compiled or not; its forward passes then take a `row`."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(segment_attention))
    AttentionMaskInterface.register(ATTENTION_NAME, mask_rule)
    model.set_attn_implementation(ATTENTION_NAME)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OneCall:
    """Plain causal attention within all sequences of one row by one call of a kernel."""

    kernel: Kernel
    spans: Spans

    @classmethod
    def of(cls, kernel: Kernel, segments: Sequence[int], device: torch.device) -> Self:
        """Return the call for sequences of these lengths, which is the same in every layer."""
        return cls(kernel=kernel, spans=Spans.of(segments, device))

    def takes(self, query: Tensor, value: Tensor) -> bool:
        """Return whether kernels compute in these types and sizes."""
        return value.shape[3] == query.shape[3] and takes(value.dtype, query.shape[3])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return the weighted values. Shapes: query [1, H, T, D], key and value [1, G, T, D] -> [1, H, T, D]."""
        q, k, v = (one[0].transpose(0, 1).to(value.dtype) for one in (query, key, value))  # [T, H or G, D]
        return self.kernel(q, k, v, self.spans, self.spans, scaling).transpose(0, 1)[None]


@dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """How one row is packed; without anything, each row is a sequence.

    torch.compile does not look into it, since it is not frozen, and so does not compile for each number of sequences.
    """

    segments: Sequence[int] | None = None  # the lengths of the sequences in it
    tree: Tree | None = None
    one_call: OneCall | TreeCall | None = None
    context: Context | None = None  # other ranks have the rest of its tokens; `segments` are those of all of it


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Rule | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    row: Row | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention within each sequence of a packed row, or in a tree, or in each row.

    `one_call` is used for plain causal attention in types and sizes that it takes; what it computes is the same.

    Shapes: B rows of T tokens, H query heads, G key-value heads, D and E the sizes of keys and values: query
    [B, H, T, D], key [B, G, T, D], value [B, G, T, E], sinks `s_aux` [H] -> [B, T, H, E].
    """
    row = row or Row()
    tree, one_call, context = row.tree, row.one_call, row.context
    if context is not None:
        _require_plain(attention_mask, row.segments or (), context)
        given: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "row": replace(row, context=None)}
        output, none = segment_attention(module, *context.heads(query, key, value), s_aux=context.own(s_aux), **given)
        return context.tokens(output), none
    num_tokens = query.shape[2]
    lengths = list(row.segments or (num_tokens,))
    assert sum(lengths) == num_tokens, (lengths, query.shape)
    scores = Scores(scaling=query.shape[3] ** -0.5 if scaling is None else scaling, softcap=softcap, sinks=s_aux)
    longest = max(lengths) if tree is None else tree.longest
    rule = attention_mask if attention_mask is not None and attention_mask.narrows(longest) else None
    if one_call is not None and scores.is_plain and rule is None and one_call.takes(query, value):
        return one_call.attend(query, key, value, scores.scaling).transpose(1, 2).contiguous(), None
    if tree is None and rule is None and scores.is_plain:
        parts = zip(query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
        outputs = [scores.attend(q, k, v, None) for q, k, v in parts]
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None
    tree = tree or _apart(tuple(lengths), query.device)
    return tree_attention(query, key, value, tree, rule, scores).transpose(1, 2).contiguous(), None


@lru_cache(maxsize=1)
def _apart(lengths: tuple[int, ...], device: torch.device) -> Tree:
    """Return a row of sequences that share nothing, which is the same in every layer."""
    return Tree.apart(lengths).to(device)


def _require_plain(rule: Rule | None, segments: Sequence[int], context: Context) -> None:
    """Raise ConfigError where a rule says less than all tokens before: it was made for this rank's tokens alone."""
    if rule is not None and rule.narrows(max(segments)):
        raise ConfigError(
            f"trainer.context_parallel is {context.size}, but this model's attention has windows or chunks, of "
            f"{rule.reach or 'an unknown number of'} tokens, and a sequence has {max(segments)}; set it to 1"
        )
