"""Attention over the slots:

- computed in two parts (cached tokens and a piece's own), or under one mask, it equals causal attention over all of
  them, for any lengths, groups of heads and scales of scores, over views of a larger cache
- a prefill of several pieces under masks, or in one call, as on a GPU, equals one in parts, as on a CPU
- a kernel is proved before it is used: not one that fails, or lets queries see what follows them
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from areal_agent.engine.embedded.decoder import (
    PackedPrefillStep,
    Piece,
    attend_in_parts,
    attend_under_mask,
    causal_mask,
    prefill_step,
)
from areal_agent.engine.embedded.kv_cache import KVCache, KVShape
from areal_agent.engine.embedded.packed import Spans, proved
from tests import fake_gpu


@given(
    num_tokens=st.integers(1, 40),
    num_past=st.integers(1, 700),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_two_parts_and_a_mask_are_the_whole(num_tokens, num_past, num_kv_heads, group, scale):
    torch.manual_seed(num_tokens * 1000 + num_past)
    end = num_past + num_tokens
    keys, values = torch.randn(2, 1, num_kv_heads, end + 5, 8)[..., :end, :]
    queries = torch.randn(1, num_tokens, num_kv_heads * group, 8).transpose(1, 2) * scale
    mask = torch.ones(num_tokens, end, dtype=torch.bool).tril(num_past)
    expected = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    own, past = (slice(num_past, None), slice(None, num_past))
    attended = attend_in_parts(queries, *(one[:, :, part] for part in (own, past) for one in (keys, values)))
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-4)
    masked = attend_under_mask(queries, keys, values, causal_mask(num_tokens, num_past, queries.device))
    torch.testing.assert_close(masked, expected, atol=1e-5, rtol=1e-4)


def test_a_prefill_under_masks_or_in_one_call_is_that_in_parts():
    """Prefill pieces without a past, with one, and of a single token."""
    shape, generator = KVShape(num_layers=1, num_kv_heads=2, head_dim=8), torch.Generator().manual_seed(0)
    queries, kv = (torch.randn(33, *heads, 8, generator=generator) for heads in ((6,), (2, 2)))
    past = torch.randn(2, 3, 2, 64, 8, generator=generator)
    pieces = [
        Piece(slot=slot, begin=begin, ids=np.zeros(num_tokens, dtype=np.int32))
        for slot, begin, num_tokens in ((0, 0, 12), (1, 37, 20), (2, 5, 1))
    ]
    found: list[torch.Tensor] = []
    for way in ("in parts", "under masks", "in one call"):
        cache = KVCache(shape, num_slots=3, num_positions=64, device=torch.device("cpu"), dtype=torch.float32)
        for piece in pieces:
            cache.write(0, piece.slot, 0, *past[:, piece.slot, :, : piece.begin])
        if way == "in one call":
            step = PackedPrefillStep.of(cache, fake_gpu.kernel, pieces)
        else:
            step = prefill_step(cache, pieces, in_parts=way == "in parts")
        found.append(step.attend(0, queries, kv))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-5, rtol=1e-4)
    assert found[0].shape == (33, 6 * 8)


def aligned_at_the_start(q, k, v, of_queries: Spans, of_keys: Spans, scaling: float):
    """As some kernels do: the first query sees the first key alone."""
    rows = []
    for (start, stop), (first, last) in zip(pairs(of_queries), pairs(of_keys), strict=True):
        one = (x.transpose(0, 1)[None] for x in (q[start:stop], k[first:last], v[first:last]))
        rows.append(scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True))
    return torch.cat([row[0].transpose(0, 1) for row in rows])


def pairs(spans: Spans):
    return pairwise(spans.offsets.tolist())


def refusing(*_: object):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize("kernel", [fake_gpu.kernel, aligned_at_the_start, refusing])
def test_a_kernel_is_used_only_where_it_attends_as_torch_does(kernel, caplog):
    like = torch.empty(0, dtype=torch.bfloat16)
    found = proved(kernel, num_heads=6, num_kv_heads=2, head_size=16, like=like)
    assert found is (kernel if kernel is fake_gpu.kernel else None)
    told = [one.message.split(",")[0] for one in caplog.records]
    assert told == ([] if found else ["prompts are computed one by one"])
