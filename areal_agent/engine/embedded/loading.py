"""Loads the model of the embedded engine from a Hugging Face folder, which it checks before anything is served.

Other architectures, and weights that are damaged, incomplete, quantised or not finite, raise ConfigError.
"""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal_agent.dtype import DType, computed_in
from areal_agent.engine.embedded.weights import not_finite
from areal_agent.errors import ConfigError
from areal_agent.files import require_no_gguf

logger = logging.getLogger(__name__)

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders of one shape (decoder.py), whose only state is keys and values."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend only on a token's own position; others would change keys that are already cached."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][^/\s]*/[^/\s]+")


def load_model(model_path: str, place: torch.device, choice: DType, *, max_context_tokens: int) -> PreTrainedModel:
    """Load a model on its device. Raises ConfigError.

    On a CPU only its layers are cast: logits are products in float32, as they are in the trainer.
    """
    _check_there(model_path)
    is_gpu = place.type == "cuda"
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        _check_supported(config, max_context_tokens)
        layers: torch.dtype = getattr(torch, computed_in(choice, config.hidden_size, is_gpu=is_gpu))
        dtype = layers if is_gpu else torch.float32
        model, loaded = cast(
            tuple[PreTrainedModel, Mapping[str, Collection[str]]],
            AutoModelForCausalLM.from_pretrained(
                model_path, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            ),
        )
        model = model.to(place)  # pyright: ignore[reportArgumentType]
    except ConfigError:
        raise
    except Exception as error:  # a boundary: transformers' errors about damaged files share no type
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f"cannot load the model {model_path!r}: {cause}; it must be a Hugging Face folder or a hub name, with "
            "weights as safetensors"
        ) from error
    if missing := loaded["missing_keys"]:  # transformers would use random numbers in their place
        raise ConfigError(
            f"cannot load the model {model_path!r}: its files lack {len(missing)} weights, {sorted(missing)[:3]}; it "
            "must be a whole causal language model"
        )
    if broken := not_finite(dict(model.named_parameters())):
        raise ConfigError(
            f"cannot load the model {model_path!r}: {len(broken)} of its weights hold NaN or infinity, {broken[:3]}; "
            "take one from before its training diverged"
        )
    cast(Any, model).model.layers.to(layers)
    return model.requires_grad_(False).eval()


def eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The end tokens in the model's and its generation config, as SGLang takes them, within the vocabulary."""
    found: set[int] = set()
    for source in (model.config, model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(one for one in found if 0 <= one < model.config.vocab_size)


def _check_there(model_path: str) -> None:
    """Check that a path is a folder, or has the form of a name on the hub, which is then asked for it."""
    require_no_gguf(model_path)
    if Path(model_path).is_dir():
        return
    if model_path == "tiny":
        raise ConfigError(
            "cannot load the model 'tiny': that name is for the key `model` of a config; build the model with "
            "python -m areal_agent.models.tiny --out FOLDER, and name the folder"
        )
    if not _HUB_NAME.fullmatch(model_path):
        raise ConfigError(
            f"cannot load the model {model_path!r}: there is no such folder; name an existing one, or a model on the "
            "hub as 'org/name'"
        )
    logger.info("there is no folder %r here: asking the hub for it", model_path)  # this takes a minute when offline


def place_of(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' and torch finds no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and device != "cpu" else "cpu")


def _check_supported(config: PretrainedConfig, max_context_tokens: int) -> None:
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(
            f"the embedded engine does not serve model type {config.model_type!r}; it serves {', '.join(MODEL_TYPES)}. "
            "SGLang and vLLM serve others: engine.backend"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            "the weights of the model are quantised, and the embedded engine serves plain floats only; use the model "
            "from which they were quantised"
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
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise ConfigError(
            f"the embedded engine does not serve rope type {rope['rope_type']!r}; it serves {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("the embedded engine rotates whole heads; partial_rotary_factor must be 1")
