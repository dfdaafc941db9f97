"""How a model's tokens see each other, as it says to transformers, and how scores become weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import sdpa_mask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rule:
    """Which tokens of a row see which, as a model says it to transformers."""

    reach: int | None  # a token sees itself and less than this many before it; None: not known
    arguments: dict[str, Any]  # of transformers' mask function, for the whole row

    def narrows(self, length: int) -> bool:
        """Return whether a sequence of this length is attended to in another way than plainly causal."""
        return self.reach is None or self.reach < length

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which of these keys these queries see, given by their places, [Q] and [K] -> [1 or B, 1, Q, K]."""
        spans: dict[str, Any] = {
            "q_offset": queries - torch.arange(len(queries), device=queries.device),  # it adds the numbers again
            "kv_offset": keys - torch.arange(len(keys), device=keys.device),
            "q_length": len(queries),
            "kv_length": len(keys),
        }
        seen = sdpa_mask(**(self.arguments | spans), allow_is_causal_skip=False)
        assert seen is not None, "transformers leaves out only masks that it may skip"
        return seen


def mask_rule(
    *, local_size: int | None = None, use_vmap: bool = False, allow_is_causal_skip: bool = True, **arguments: Any
) -> Rule | None:
    """Return a row's rule, or None for plain causal attention. transformers calls it for each kind of layer.

    `local_size` is the size of a window or a chunk, and `use_vmap` says that the model has added a rule of its own.
    transformers has added that packed sequences do not see each other, and counts positions within each.
    """
    if local_size is None and not use_vmap:
        return None
    return Rule(reach=None if use_vmap else local_size, arguments={**arguments, "use_vmap": use_vmap})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """How scores become weights: s = scaling q k^T, and c tanh(s / c) with a soft cap c (Gemma 2, arXiv 2408.00118).

    A sink takes part in its head's softmax like a key without a value (gpt-oss; arXiv 2309.17453).
    """

    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [H]

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        """Return the weighted values. Without `seen`, attention is causal and scores must be plain.

        Shapes: query [B, H, Q, D], key [B, G, K, D], value [B, G, K, E], seen [1 or B, 1, Q, K] -> [B, H, Q, E].
        """
        if seen is None or self.is_plain:
            return scaled_dot_product_attention(
                query, key, value, attn_mask=seen, is_causal=seen is None, scale=self.scaling, enable_gqa=True
            )
        num_sharing = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(num_sharing, dim=1) for one in (key, value))
        scores = (query @ key.transpose(2, 3)).float() * self.scaling  # [B, H, Q, K]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
        return weights.to(value.dtype) @ value
