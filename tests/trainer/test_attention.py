"""Attention within the sequences of a packed row.

- It is that of one row under a block-diagonal causal mask; without segments that of a causal row.
- Nothing flows back into another sequence.
- A sliding window reaches as far back as transformers' own, packed too.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, MistralConfig

from areal_agent.trainer.model import segment_attention, use_segment_attention

LENGTHS = (3, 1, 5)


@pytest.fixture
def qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, sum(LENGTHS), 8, generator=generator) for heads in (4, 2, 2)]


def attend(qkv: list[torch.Tensor], segments: tuple[int, ...] | None) -> torch.Tensor:
    return segment_attention(nn.Identity(), *qkv, None, scaling=0.3, segments=segments)[0]


@pytest.mark.parametrize("segments", [LENGTHS, None])
def test_it_is_attention_under_a_block_diagonal_causal_mask(qkv, segments):
    blocks = [torch.ones(length, length, dtype=torch.bool) for length in segments or (sum(LENGTHS),)]
    mask = torch.block_diag(*blocks).bool().tril()
    expected = scaled_dot_product_attention(*qkv, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attend(qkv, segments), expected)


def test_nothing_flows_back_into_another_sequence(qkv):
    inputs = [one.requires_grad_() for one in qkv]
    middle = attend(inputs, LENGTHS)[:, 3:4]
    for gradient in torch.autograd.grad(middle.sum(), inputs[2:]):
        assert gradient[:, :, 3].abs().min() > 0
        assert gradient[:, :, :3].abs().max() == 0 == gradient[:, :, 4:].abs().max()


def test_a_sliding_window_reaches_as_far_back_as_in_transformers():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        initializer_range=0.2,
    )
    theirs = AutoModelForCausalLM.from_config(config).eval()
    ours = copy.deepcopy(theirs)
    use_segment_attention(ours)
    rows = [torch.randint(0, 61, (1, length)) for length in (11, 3)]
    positions = torch.cat([torch.arange(11), torch.arange(3)])[None]
    with torch.no_grad():
        alone = torch.cat([theirs(input_ids=row, use_cache=False).logits for row in rows], dim=1)
        packed = ours(input_ids=torch.cat(rows, 1), position_ids=positions, segments=(11, 3), use_cache=False).logits
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
