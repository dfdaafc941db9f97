"""The models that are measured, with random weights, and a tokenizer that knows their ids by number."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MAX_CONTEXT_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    vocabulary: int
    intermediate: int
    heads: int
    head_dim: int
    queries_per_key: int = 2

    @property
    def kv_heads(self) -> int:
        return self.heads // self.queries_per_key


SHAPES = {
    "tiny": Shape(hidden=128, layers=4, vocabulary=2048, intermediate=384, heads=4, head_dim=32),  # 1.05M parameters
    "mid": Shape(hidden=512, layers=8, vocabulary=4096, intermediate=1536, heads=8, head_dim=64),  # 27.3M
}
GPU_SHAPES = {
    # SmolLM2-135M's numbers
    "135M": Shape(hidden=576, layers=30, vocabulary=49_152, intermediate=1536, heads=9, head_dim=64, queries_per_key=3),
    "0.6B": Shape(hidden=1024, layers=28, vocabulary=151_936, intermediate=3072, heads=16, head_dim=128),
    "1.7B": Shape(hidden=2048, layers=28, vocabulary=151_936, intermediate=6144, heads=16, head_dim=128),
}


def build_model(shape: Shape, folder: Path) -> None:
    """Save the model as a Hugging Face folder, in float32, with a tokenizer."""
    build_weights(shape, folder, device=torch.device("cpu"), dtype=torch.float32)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(shape.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def build_weights(shape: Shape, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
    """Save the model without a tokenizer; random numbers are drawn on `device`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with device:
        model = Qwen3ForCausalLM(config).to(dtype)  # pyright: ignore[reportArgumentType]
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
