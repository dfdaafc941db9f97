"""The policy's forward pass.

- A padded micro-batch gives the log-probabilities that each sequence has alone in a plain forward pass.
- Log-probabilities are taken at the rollout's temperature.
- A folder without a model or without some weights, and cuda without a device, are refused.
- Attention in a packed row is attention under a block-diagonal causal mask, and nothing flows into another sequence.
- A sliding window reaches as far back as transformers' own, packed too.
"""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, MistralConfig

from areal_agent.algorithms.batching import collate, sample_of
from areal_agent.errors import ConfigError
from areal_agent.trainer.attention import segment_attention, use_segment_attention
from areal_agent.trainer.model import Policy, choose_device
from tests.trainer.lab import CPU, Lab


@pytest.fixture(scope="module")
def policy(model_folder):
    return Policy.load(model_folder, CPU)


def test_a_padded_batch_equals_plain_forward_passes_one_by_one(model_folder, policy, make_batch):
    records = make_batch(1).records
    lab = Lab(model_folder)
    samples = [sample_of(record) for record in records]
    with torch.no_grad():
        padded, entropy = policy.logprobs_and_entropy(collate(samples, CPU))
        alone = torch.cat([lab.logprobs(one)[torch.from_numpy(one.loss_mask)[1:]] for one in records])
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
    assert 0.0 < entropy.min().item() < entropy.max().item() < torch.log(torch.tensor(61.0)).item()


def test_a_folder_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot load a causal language model from"):
        Policy.load(tmp_path, CPU)


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
