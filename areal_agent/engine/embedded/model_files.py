"""Loads a Hugging Face folder as a model that this engine serves, or says why it does not. Knows no cache.

Whatever a folder may hold is answered here, before anything is served: architectures of another kind, weights that are
damaged, incomplete, quantised or not finite.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal_agent.engine.embedded.weights import not_finite
from areal_agent.errors import ConfigError

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders of one shape (decoder.py), which have no other state than keys and values."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's own position only: others would move keys that are cached already."""


def load_model(model_path: str, *, device: Literal["auto", "cpu", "cuda"], max_context_tokens: int) -> PreTrainedModel:
    """A model on its device: float32 on a CPU, bfloat16 on a GPU. Raises ConfigError."""
    place = _place(device)
    _check_there(model_path)
    try:
        model, missing = _read(
            model_path, max_context_tokens, torch.bfloat16 if place.type == "cuda" else torch.float32
        )
        model = model.to(place)  # pyright: ignore[reportArgumentType]
    except ConfigError:
        raise
    except Exception as error:  # a boundary: what transformers makes of damaged files has no type in common
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"cannot load the model {model_path!r}: {cause}; it must be a Hugging Face folder or a hub name, with "
            "weights as safetensors"
        ) from error
    if missing:  # transformers goes on with random numbers in their place
        raise ConfigError(
            f"cannot load the model {model_path!r}: its files lack {len(missing)} weights, {sorted(missing)[:3]}; it "
            "must be a whole causal language model"
        )
    if broken := not_finite(dict(model.named_parameters())):
        raise ConfigError(
            f"cannot load the model {model_path!r}: {len(broken)} of its weights hold NaN or infinity, {broken[:3]}; "
            "take one from before its training diverged"
        )
    return model.requires_grad_(False).eval()


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end tokens of the model and of its generation config, as SGLang takes them, if the model has such tokens."""
    found: set[int] = set()
    for source in (model.config, model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(one for one in found if 0 <= one < model.config.vocab_size)


def _check_there(model_path: str) -> None:
    """Of a name that is no folder, the hub is asked; a path is no such name."""
    if Path(model_path).is_dir():
        return
    if model_path.startswith(("/", ".", "~")):
        raise ConfigError(f"cannot load the model {model_path!r}: there is no such folder; name one, or one of the hub")
    if model_path == "tiny":
        raise ConfigError(
            "cannot load the model 'tiny': that name is for the key `model` of a config; build the model by "
            "python -m areal_agent.models.tiny --out FOLDER, and name the folder"
        )
    logger.info("there is no folder %r here: asking the hub for it", model_path)  # offline, that takes a minute


def _place(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' and torch finds no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def _read(model_path: str, max_context_tokens: int, dtype: torch.dtype) -> tuple[PreTrainedModel, Collection[str]]:
    """A model, and the weights that its files lack."""
    _check_supported(AutoConfig.from_pretrained(model_path), max_context_tokens)
    model, loaded = cast(
        tuple[PreTrainedModel, Mapping[str, Collection[str]]],
        AutoModelForCausalLM.from_pretrained(
            model_path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        ),
    )
    return model, loaded["missing_keys"]


def _check_supported(config: PretrainedConfig, max_context_tokens: int) -> None:
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"the embedded engine does not serve model type {config.model_type!r}; it serves {', '.join(MODEL_TYPES)}. "
            "SGLang and vLLM serve others: engine.backend"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the weights of the model are quantised, and the embedded engine serves, and is pushed, plain floats; take "
            "the model that they were made from"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"the embedded engine does not serve the activation {config.hidden_act!r}; it serves 'silu'")
    longest: int = config.max_position_embeddings
    if max_context_tokens > longest:
        raise ConfigError(
            f"max_context_tokens is {max_context_tokens} and the model was made for {longest}; "
            f"set it (engine.max_context_tokens, --max-context) to at most {longest}"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_context_tokens:
        raise ConfigError(
            f"the model attends over a sliding window of {window} tokens, which the embedded engine does not serve "
            f"beyond the window; set max_context_tokens to at most {window}"
        )
    _check_rotations(config)


def _check_rotations(config: PretrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise ConfigError(
            f"the embedded engine does not serve rope type {rope['rope_type']!r}; it serves {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("the embedded engine rotates whole heads; partial_rotary_factor must be 1")
