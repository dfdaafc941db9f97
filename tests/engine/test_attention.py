"""Attention in two parts, over what is cached and over a piece's own tokens, is causal attention over all of them:

- for any lengths, groups of heads and scales of the scores, over views of a larger cache
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from areal_agent.engine.embedded.decoder import attend_in_parts


@settings(deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    num_past=st.integers(1, 700),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_two_parts_are_the_whole(num_tokens, num_past, num_kv_heads, group, scale):
    torch.manual_seed(num_tokens * 1000 + num_past)
    end = num_past + num_tokens
    keys, values = torch.randn(2, 1, num_kv_heads, end + 5, 8)[..., :end, :]
    queries = torch.randn(1, num_tokens, num_kv_heads * group, 8).transpose(1, 2) * scale
    mask = torch.ones(num_tokens, end, dtype=torch.bool).tril(num_past)
    expected = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    own, past = (slice(num_past, None), slice(None, num_past))
    attended = attend_in_parts(queries, *(one[:, :, part] for part in (own, past) for one in (keys, values)))
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-4)
