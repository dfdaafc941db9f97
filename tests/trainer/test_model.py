"""The policy's forward pass.

- A folder without some weights, and cuda without a device, are refused; test_client.py has one without a model.
- Attention in a packed row is attention under a block-diagonal causal mask, and nothing flows into another sequence.
- Windows, soft caps and sinks are those of the written-out formula, also where queries are taken in blocks.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import MistralConfig
from transformers.masking_utils import create_sliding_window_causal_mask

from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import ATTENTION_NAME, QUERIES_PER_BLOCK, segment_attention
from areal_agent.trainer.model import Policy, choose_device
from tests.trainer.lab import CPU


@pytest.fixture(scope="module")
def policy(model_folder):
    return Policy.load(model_folder, CPU)


def test_weights_that_are_missing_from_the_files_are_a_config_error(model_folder, tmp_path):
    shutil.copyfile(model_folder / "config.json", tmp_path / "config.json")
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its files lack the weights \['model\.norm\.weight'\]"):
        Policy.load(tmp_path, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_config_error():
    with pytest.raises(ConfigError, match=r"trainer\.device is 'cuda'"):
        choose_device("cuda")


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


def dense(qkv: list[torch.Tensor], window: int, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention within one sequence, written out: [1, T, H, D]."""
    query, key, value = qkv[0], *(one.repeat_interleave(2, dim=1) for one in qkv[1:])
    scores = 0.3 * query @ key.transpose(2, 3)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    weights = scores.masked_fill((distance < 0) | (distance >= window), float("-inf")).exp()
    rest = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return (weights / (weights.sum(-1, keepdim=True) + rest) @ value).transpose(1, 2)


@pytest.mark.usefixtures("policy")  # which registers the attention
@pytest.mark.parametrize("window", [2 * QUERIES_PER_BLOCK, 100, 1])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_soft_caps_and_sinks_in_blocks_are_the_formula(window, softcap, has_sinks):
    generator = torch.Generator().manual_seed(0)
    lengths = (7, QUERIES_PER_BLOCK + 50)
    qkv = [torch.randn(1, heads, sum(lengths), 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4, generator=generator).requires_grad_() if has_sinks else None
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    config = MistralConfig(sliding_window=window, attn_implementation=ATTENTION_NAME)
    states = torch.zeros(1, sum(lengths), 1)
    rule = create_sliding_window_causal_mask(config, states, None, None, positions)
    found, _ = segment_attention(
        nn.Identity(), *qkv, rule, scaling=0.3, softcap=softcap, s_aux=sinks, segments=lengths, sliding_window=window
    )
    parts = zip(*(one.split(lengths, dim=2) for one in qkv), strict=True)
    expected = torch.cat([dense(list(part), window, softcap, sinks) for part in parts], dim=1)
    torch.testing.assert_close(found, expected)
    inputs = [*qkv, *([] if sinks is None else [sinks])]
    toward = torch.randn(found.shape, generator=generator)
    for ours, theirs in zip(*(torch.autograd.grad(one, inputs, toward) for one in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
