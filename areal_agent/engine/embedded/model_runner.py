"""A transformers model as two functions: `prefill` and `decode`, token ids to logits. Owns weights and KV cache.

It knows nothing of requests, sampling or time. Everything runs in the thread that calls it, under inference_mode.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal_agent.engine.embedded.attention import (
    ATTENTION_NAME,
    PrefillStep,
    Segment,
    Step,
    decode_step,
    register_attention,
)
from areal_agent.engine.embedded.kv_cache import KVCache, KVShape
from areal_agent.engine.embedded.weights import WeightLayout
from areal_agent.errors import ConfigError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders whose attention passes keyword arguments through and has no other state than keys and values."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's own position only: others would move keys that are cached already."""


class ModelRunner:
    """The model, its KV cache and the layout of its weights. Rows are slots 0..n-1."""

    def __init__(self, model: PreTrainedModel, *, model_path: str, num_slots: int, max_context_tokens: int) -> None:
        config = model.config
        self.model_path = model_path
        self.num_slots = num_slots
        self.max_context_tokens = max_context_tokens
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        self.layout = WeightLayout.of(model)
        self._model = model
        self.device = model.device
        self._dtype = model.dtype
        self._cache = KVCache(_kv_shape(config, num_slots, max_context_tokens), device=model.device, dtype=model.dtype)

    @classmethod
    def load(
        cls, model_path: str, *, device: Literal["auto", "cpu", "cuda"], num_slots: int, max_context_tokens: int
    ) -> Self:
        """Load a Hugging Face folder: float32 on a CPU, bfloat16 on a GPU. Raises ConfigError."""
        place = _resolve_device(device)
        register_attention()
        try:
            config = AutoConfig.from_pretrained(model_path)
            _check_supported(config, max_context_tokens)
            model = AutoModelForCausalLM.from_pretrained(
                model_path,
                dtype=torch.bfloat16 if place.type == "cuda" else torch.float32,
                attn_implementation=ATTENTION_NAME,
            )
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"cannot load the model {model_path!r}: {cause}; it must be a Hugging Face folder or a hub name"
            ) from error
        model = cast(PreTrainedModel, model).to(place).requires_grad_(False).eval()  # pyright: ignore[reportArgumentType]
        return cls(model, model_path=model_path, num_slots=num_slots, max_context_tokens=max_context_tokens)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[Sequence[int]], first_slot: int) -> Tensor:
        """Compute whole sequences into slots from `first_slot` on; the logits after each one's last token, `[n, V]`."""
        segments: list[Segment] = []
        for sequence in sequences:
            start = segments[-1].stop if segments else 0
            segments.append(Segment(slot=first_slot + len(segments), start=start, stop=start + len(sequence)))
        ids = torch.tensor([[id_ for sequence in sequences for id_ in sequence]], device=self.device)
        positions = torch.cat([torch.arange(len(sequence), device=self.device) for sequence in sequences])[None]
        hidden = self._forward(ids, positions, PrefillStep(cache=self._cache, segments=segments))
        last = torch.tensor([segment.stop - 1 for segment in segments], device=self.device)
        return self._logits(hidden[0, last])

    @torch.inference_mode()
    def decode(self, last_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One more token for each of the first n slots; `lengths` count that token. The logits after it, `[n, V]`."""
        step = decode_step(self._cache, lengths, device=self.device, dtype=self._dtype)
        ids = torch.tensor(last_ids, device=self.device)[:, None]
        return self._logits(self._forward(ids, step.positions[:, None], step)[:, 0])

    @torch.inference_mode()
    def move(self, source: int, target: int, num_positions: int) -> None:
        """Give the row in slot `source` the slot `target`."""
        self._cache.move(source, target, num_positions)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights that `layout` has proved, in place."""
        self.layout.copy(weights)

    def _forward(self, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        decoder = cast(Any, self._model).model
        return decoder(input_ids=ids, position_ids=positions, use_cache=False, slot_step=step).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return cast(Any, self._model).lm_head(hidden).float()


def _resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' and torch finds no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def _check_supported(config: PretrainedConfig, max_context_tokens: int) -> None:
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"the embedded engine does not serve model type {config.model_type!r}; it serves {', '.join(MODEL_TYPES)}"
        )
    longest: int = config.max_position_embeddings
    if max_context_tokens > longest:
        raise ConfigError(
            f"max_context_tokens is {max_context_tokens} and the model was made for {longest}; "
            f"set it to at most {longest}"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_context_tokens:
        raise ConfigError(
            f"the model attends over a sliding window of {window} tokens, which the embedded engine does not serve "
            f"beyond the window; set max_context_tokens to at most {window}"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise ConfigError(f"the embedded engine does not serve rope type {rope!r}; it serves {', '.join(ROPE_TYPES)}")


def _kv_shape(config: PretrainedConfig, num_slots: int, max_context_tokens: int) -> KVShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        num_slots=num_slots,
        num_positions=max_context_tokens,
    )


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end tokens of the model and of its generation config, as SGLang takes them."""
    found: set[int] = set()
    for source in (model.config, model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)
