"""The model and the records that all sides of the benchmark train on: a random Qwen3 and heavy-tailed lengths.

Written into a folder: `model/` (Hugging Face, with a tokenizer of one word per id) and `records.npz`. Prompt lengths
are 16 / u of a uniform u, cut at 512; completions 16 / sqrt(u), cut at 256: four per prompt, rewarded at random.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

GROUP_SIZE = 4
NUM_SPECIAL = 2  # the ids of padding and of the end


def write_material(folder: Path, *, vocab_size: int, num_prompts: int) -> None:
    """Write both, from fixed seeds."""
    _write_model(folder / "model", vocab_size)
    rng = np.random.default_rng(0)
    prompts = np.clip(16 / rng.uniform(0, 1, num_prompts), 16, 512).astype(np.int64)
    completions = np.clip(16 / np.sqrt(rng.uniform(0, 1, num_prompts * GROUP_SIZE)), 16, 256).astype(np.int64)
    np.savez(
        folder / "records.npz",
        prompt_lengths=prompts,
        prompt_ids=rng.integers(NUM_SPECIAL, vocab_size, prompts.sum()),
        completion_lengths=completions,
        completion_ids=rng.integers(NUM_SPECIAL, vocab_size, completions.sum()),
        rewards=rng.integers(0, 2, num_prompts * GROUP_SIZE).astype(np.float32),
    )


def _write_model(folder: Path, vocab_size: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)


def read_records(folder: Path) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]], NDArray[np.float32]]:
    """Return prompts, completions (a group's in a row) and rewards."""
    with np.load(folder / "records.npz") as file:
        prompts = np.split(file["prompt_ids"], np.cumsum(file["prompt_lengths"])[:-1])
        completions = np.split(file["completion_ids"], np.cumsum(file["completion_lengths"])[:-1])
        return prompts, completions, file["rewards"]
