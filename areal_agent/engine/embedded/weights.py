"""New weights for the embedded engine: read or received, proved to fit the model, then copied, all of them or none.

Reading and proving may happen in any thread while the model samples; the copy belongs to the model's thread.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor, nn

from areal_agent.engine.embedded.sharing import opened
from areal_agent.engine.embedded.transfer import BLOCK_BYTES, checksum, take, tensors_over
from areal_agent.engine.pushes import DTYPE_BYTES, check_layout, take_folder, take_shared_memory, weight_files
from areal_agent.errors import WeightUpdateError
from areal_agent.types import (
    DeviceWeights,
    DiskWeights,
    DistributedWeights,
    SharedMemoryWeights,
    TensorEntry,
    Weights,
)


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
