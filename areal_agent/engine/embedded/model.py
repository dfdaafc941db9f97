"""The model: reads and checks its folder, turns token ids into logits, and takes new weights in place.

`load_model` checks a Hugging Face folder before anything is served, and raises ConfigError for other architectures and
for weights that are damaged, incomplete, quantised or not finite. `ModelRunner` owns the model's weights and KV cache.
Use it from one thread, which computes under inference_mode; others may only set `unneeded` to end the current step.

A new set of weights is read, proved to fit the model, and then copied: all of it or nothing. Reading and proving may
happen in any thread while the model samples; only `ModelRunner.take` belongs to the model thread.
"""

import logging
import math
import re
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from areal_agent.dtype import DType, computed_in, slowness
from areal_agent.engine.embedded.decoder import (
    Decoder,
    PackedPrefillStep,
    Piece,
    ScoringStep,
    decode_step,
    prefill_step,
)
from areal_agent.engine.embedded.fixed_shapes import FixedShapes
from areal_agent.engine.embedded.kv_cache import KVCache, SlotStore, plan_room, whole_positions
from areal_agent.engine.embedded.packed import Kernel, packed_kernel, proved, takes
from areal_agent.engine.embedded.sharing import opened
from areal_agent.engine.embedded.transfer import BLOCK_BYTES, checksum, take, tensors_over
from areal_agent.engine.pushes import DTYPE_BYTES, check_layout, take_folder, take_shared_memory, weight_files
from areal_agent.errors import ConfigError, EngineRejected, WeightUpdateError
from areal_agent.files import require_no_gguf
from areal_agent.types import (
    DeviceWeights,
    DiskWeights,
    DistributedWeights,
    SharedMemoryWeights,
    TensorEntry,
    Weights,
)

logger = logging.getLogger(__name__)


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Dense decoders of one shape (decoder.py), whose only state is keys and values."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend only on a token's own position; others would change keys that are already cached."""


SCORED = 256
"""Tokens whose logits are computed at once when a sequence is scored: they bound the memory of large vocabularies."""

SEEN_TOKENS = 65_536
"""Tokens of prompts, with those before them, whose keys and values are copied side by side for one call."""

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


def _place(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
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


class ModelRunner:
    """The model, its keys and values, and the layout of its weights. Rows are slots 0..n-1 of `kv`."""

    def __init__(
        self,
        model_path: str,
        *,
        device: Literal["auto", "cpu", "cuda"],
        dtype: DType = "auto",
        num_slots: int,
        max_context_tokens: int,
        kv_tokens: int | None = None,
        leave_bytes: int | None = None,
        num_sharing: int = 1,
        fixed_shapes: bool | None = None,
    ) -> None:
        """Load a Hugging Face folder and allocate the KV cache.

        With `fixed_shapes`, by default on a GPU, decode steps have fixed shapes. Raises ConfigError, also when there is
        no room for one context.
        """
        place = _place(device)
        if slow := slowness("engine.dtype", dtype, is_gpu=place.type == "cuda"):
            logger.warning("%s", slow)
        model = load_model(model_path, place, dtype, max_context_tokens=max_context_tokens)
        self.model_path = model_path
        self.max_context_tokens = max_context_tokens
        self.vocab_size: int = model.config.vocab_size
        self.eos_token_ids = eos_token_ids(model)
        self.device = model.device  # with its index
        self.layout = WeightLayout(model)
        self.unneeded = threading.Event()  # when set, `prefill` and `decode` raise StepGivenUp between two layers
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new shape, in 1.3 ms a call
        num_positions = whole_positions(max_context_tokens)
        self._decoder = Decoder(model, max_positions=num_positions)
        self.kernel = self._choose_kernel() if is_gpu else None
        room = plan_room(
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            leave_bytes=leave_bytes,
            num_sharing=num_sharing,
            token_bytes=self._decoder.kv_shape.num_bytes(self._decoder.dtype),
            device=self.device,
        )
        self.num_slots = room.num_slots
        cache = KVCache(
            self._decoder.kv_shape,
            num_slots=room.num_slots,
            num_positions=num_positions,
            device=self.device,
            dtype=self._decoder.dtype,
        )
        self.kv = SlotStore(cache, room, max_context_tokens=max_context_tokens)
        is_fixed = is_gpu if fixed_shapes is None else fixed_shapes
        self.fixed = None
        if is_fixed:
            self.fixed = FixedShapes(
                self._decoder, cache, max_context_tokens=max_context_tokens, vocab_size=self.vocab_size
            )

    def _choose_kernel(self) -> Kernel | None:
        """Return a proved kernel for prefills in one call; None where there is none, in float32 for example."""
        shape, dtype = self._decoder.kv_shape, self._decoder.dtype
        kernel = packed_kernel() if takes(dtype, shape.head_dim) else None
        like = torch.empty(0, dtype=dtype, device=self.device)
        heads = {"num_heads": self._decoder.num_heads, "num_kv_heads": shape.num_kv_heads, "head_size": shape.head_dim}
        return None if kernel is None else proved(kernel, **heads, like=like)

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute keys and values of the pieces; return the logits after the last token of each, `[n, V]`."""
        ids = torch.from_numpy(np.concatenate([piece.ids for piece in pieces])).to(self.device)
        positions = np.concatenate([np.arange(piece.begin, piece.begin + len(piece.ids)) for piece in pieces])
        num_seen = sum(piece.begin + len(piece.ids) for piece in pieces)
        if self.kernel is None or num_seen > SEEN_TOKENS:
            step = prefill_step(self.kv.cache, pieces, in_parts=self.device.type == "cpu")
        else:
            step = PackedPrefillStep.of(self.kv.cache, self.kernel, pieces)
        last = torch.from_numpy(np.cumsum([len(piece.ids) for piece in pieces]) - 1).to(self.device)
        hidden = self._decoder.hidden(ids, torch.from_numpy(positions).to(self.device), step, unneeded=self.unneeded)
        return self._decoder.logits(hidden[last])

    @torch.inference_mode()
    def decode(self, last_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Compute one more token in each of the first n slots, counted by `lengths`; return its logits, `[n, V]`."""
        if self.fixed is not None and self.fixed.takes(lengths):
            return self.fixed.logits(last_ids, lengths, unneeded=self.unneeded)
        step = decode_step(self.kv.cache, lengths)
        ids = torch.tensor(last_ids, device=self.device)
        return self._decoder.logits(self._decoder.hidden(ids, step.positions, step, unneeded=self.unneeded))

    @torch.inference_mode()
    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Return the log-probability of each token after position `start`, given all before it: `[T - 1 - start]`."""
        tokens = torch.tensor(ids, device=self.device)
        positions = torch.arange(len(tokens), device=self.device)
        hidden = self._decoder.hidden(tokens, positions, ScoringStep(), unneeded=threading.Event())  # runs to its end
        scores: list[float] = []
        for part, targets in zip(hidden[start:-1].split(SCORED), tokens[start + 1 :].split(SCORED), strict=True):
            rows = torch.log_softmax(self._decoder.logits(part) / temperature, dim=-1)  # [n, V]
            scores += rows.gather(1, targets[:, None])[:, 0].tolist()
        return scores

    def take(self, proved: Mapping[str, Tensor]) -> None:
        """Copy new weights, which `layout` has proved, into the model."""
        self.layout.copy(proved)
        self._decoder.pack()

    def release_memory(self) -> None:
        """Free the memory of all keys and values. Nothing can be computed until `resume_memory`."""
        if self.fixed is not None:
            self.fixed.forget()
        self.kv.cache.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch would keep it for this process

    def resume_memory(self) -> None:
        """Allocate the memory again. Raises EngineRejected when there is not enough."""
        try:
            self.kv.cache.allocate()
        except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise EngineRejected(
                f"there is no memory for the keys and values of {self.kv.num_tokens} tokens in the slots of "
                f"{self.num_slots} requests: {str(error)[:200]}; let the trainer free its memory, and resume again"
            ) from error
        if self.fixed is not None:
            self.fixed.record()


# --------------------------------------------------------------------------------------------- new weights


class WeightLayout:
    """The weights of a model: exactly the names and shapes of `model.named_parameters()`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())  # tied ones once, under their first name
        first = {id(parameter): name for name, parameter in self._parameters.items()}
        every = model.named_parameters(remove_duplicate=False)
        self._aliases = {name: first[id(one)] for name, one in every if name not in self._parameters}

    def prove(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights by parameter name if they fit. Raises WeightUpdateError; nothing is copied."""
        for alias, name in self._aliases.items():
            if alias in weights and name in weights and not torch.equal(weights[alias], weights[name]):
                raise WeightUpdateError(
                    f"{alias!r} and {name!r} are tied in the engine's model and differ in the new weights; "
                    "publish the model that the engine loaded"
                )
        proved = {name: tensor for name, tensor in weights.items() if name not in self._aliases}
        missing, unknown = sorted(self._parameters.keys() - proved), sorted(proved.keys() - self._parameters)
        if missing or unknown:
            raise WeightUpdateError(
                f"the new weights lack {len(missing)} tensors {missing[:3]} and have {len(unknown)} that the "
                f"engine's model does not know {unknown[:3]}; publish the model that the engine loaded"
            )
        for name, tensor in proved.items():
            expected = self._parameters[name]
            if tensor.shape != expected.shape:
                raise WeightUpdateError(
                    f"{name!r} has shape {tuple(tensor.shape)} and the engine's model has {tuple(expected.shape)}; "
                    "publish the model that the engine loaded"
                )
        if broken := not_finite(proved):
            raise WeightUpdateError(
                f"{broken[0]!r} and {len(broken) - 1} more of the new weights hold NaN or infinity: the training that "
                "made them has diverged; go on from earlier weights, with a lower learning rate"
            )
        return proved

    def copy(self, proved: Mapping[str, Tensor]) -> None:
        """Copy weights into the parameters, in place; on a GPU in a few launches."""
        with torch.no_grad():
            cast(Any, torch)._foreach_copy_([self._parameters[name] for name in proved], [*proved.values()])

    def holds(self, proved: Mapping[str, Tensor]) -> bool:
        """Return whether the model has these values, compared in the narrower of the two float types."""
        return all(_is_same(self._parameters[name], tensor) for name, tensor in proved.items())


def not_finite(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of weights with NaN or infinity. Both survive a sum, which costs one reading."""
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in weights.values()]).cpu()
    return [name for name, total in zip(weights, sums.tolist(), strict=True) if not math.isfinite(total)]


def _is_same(held: Tensor, new: Tensor) -> bool:
    narrow = min(held.dtype, new.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(held.to(narrow), new.to(device=held.device, dtype=narrow))


def take_weights(
    source: Weights, layout: WeightLayout, device: torch.device, *, needs_manifest: bool = True
) -> Mapping[str, Tensor]:
    """Read or receive a set of weights into memory of our own, which cannot change afterwards, and prove it.

    A folder is verified by its manifest; without `needs_manifest` it is only mapped, and must not change until the
    weights are copied. Raises WeightUpdateError.
    """
    match source:
        case DistributedWeights():
            return layout.prove(_receive(source, device))
        case DeviceWeights():
            return layout.prove(_open(source, device))
        case DiskWeights():
            weights = _read_folder(source, needs_manifest=needs_manifest)
        case SharedMemoryWeights():
            weights = _tensors(torch.from_numpy(take_shared_memory(source)), source.entries)
    return layout.prove(_beside_the_model(weights, device))


def _beside_the_model(weights: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move weights to a GPU in advance, so that the swap copies there, if as much again stays free for a step."""
    if device.type != "cuda" or not has_room_beside(sum(tensor.nbytes for tensor in weights.values()), device):
        return weights
    return {name: tensor.to(device) for name, tensor in weights.items()}


def has_room_beside(num_bytes: int, device: torch.device) -> bool:
    """Return whether as much as new weights take stays free for a step when they lie beside the model."""
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] >= 2 * num_bytes


def _receive(source: DistributedWeights, device: torch.device) -> dict[str, Tensor]:
    """Receive weights from the trainer into the memory of `device`."""
    check_layout(source.entries)
    end = max(entry.offset + entry.num_bytes for entry in source.entries)
    if any(part.num_bytes % BLOCK_BYTES for part in source.parts) or end > source.num_bytes:
        raise WeightUpdateError(
            f"the weights do not lie within the {source.num_bytes} bytes sent; the manifest is damaged"
        )
    data = torch.empty(source.num_bytes, dtype=torch.uint8, device=device)
    try:
        take(asdict(source), data, group=secrets.token_hex(8), num_members=1, device=data.device)
    except (RuntimeError, ValueError) as error:
        raise WeightUpdateError(str(error)) from error
    return _tensors(data, source.entries)


def _open(source: DeviceWeights, device: torch.device) -> dict[str, Tensor]:
    """Copy weights out of memory that the trainer shares; if it writes there meanwhile, the checksum tells."""
    check_layout(source.entries)
    try:
        with opened(source.handle, source.device, device) as shared:
            data = shared.clone() if has_room_beside(len(shared), device) else shared.cpu()
            del shared  # the mapping ends with the last of its tensors
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"the trainer's memory cannot be opened: {error}") from error
    end = max(entry.offset + entry.num_bytes for entry in source.entries)
    if end > len(data) or len(data) % BLOCK_BYTES or checksum(data) != source.checksum:
        raise WeightUpdateError(
            f"the {len(data)} bytes in the trainer's memory are not those of its record; they were overwritten, or "
            "the record is damaged: publish them again"
        )
    return _tensors(data, source.entries)


def _read_folder(source: DiskWeights, *, needs_manifest: bool) -> dict[str, Tensor]:
    folder = Path(source.path)
    try:
        if needs_manifest:
            files = [load(data) for data in take_folder(source).values()]
        else:
            files = [load_file(folder / name) for name in weight_files(folder)]
        return {name: _checked(name, tensor) for file in files for name, tensor in file.items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightUpdateError(
            f"cannot read weights from {source.path!r}: {error}; it must be a Hugging Face folder with safetensors"
        ) from error


def _checked(name: str, tensor: Tensor) -> Tensor:
    if str(tensor.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        raise ValueError(f"{name!r} is stored as {tensor.dtype}, and weights must be one of {', '.join(DTYPE_BYTES)}")
    return tensor


def _tensors(data: Tensor, entries: Sequence[TensorEntry]) -> dict[str, Tensor]:
    """Tensors over the bytes, which they keep alive."""
    return dict(tensors_over(data, [asdict(entry) for entry in entries]))
