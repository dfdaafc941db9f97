"""Reads a new set of weights, proves that the model can take it, and copies it in place: all of it or nothing.

Reading and proving may happen in any thread while the model samples; only `WeightLayout.copy` belongs to the model
thread.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn

from areal_agent.engine.embedded.transfer import BLOCK_BYTES, Request, checksum, receive, tensors_over
from areal_agent.engine.pushes import check_places, take_folder, take_shared_memory, weight_files
from areal_agent.errors import WeightUpdateError
from areal_agent.types import DiskWeights, DistributedWeights, SharedMemoryWeights, TensorEntry, Weights

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes of stored weights; copying casts them to the model's own dtype."""


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
        """Copy weights into the parameters, in place."""
        with torch.no_grad():
            for name, tensor in proved.items():
                self._parameters[name].copy_(tensor)

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


def read_weights(source: SharedMemoryWeights | DiskWeights, layout: WeightLayout) -> Mapping[str, Tensor]:
    """Read and prove a set of weights; a folder may come from anywhere. Raises WeightUpdateError."""
    weights = _read_folder(Path(source.path)) if isinstance(source, DiskWeights) else _read_shared_memory(source)
    return layout.prove(weights)


def take_weights(source: Weights, layout: WeightLayout, device: torch.device) -> Mapping[str, Tensor]:
    """Read or receive a set of weights into memory of our own, which cannot change afterwards, and prove it.

    A folder needs its manifest. Raises WeightUpdateError.
    """
    match source:
        case DistributedWeights():
            weights = _receive(source, device)
        case DiskWeights():
            weights = _beside_the_model(_take_folder(source), device)
        case SharedMemoryWeights():
            weights = _beside_the_model(_read_shared_memory(source), device)
    return layout.prove(weights)


def _beside_the_model(weights: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move weights to a GPU in advance, so that the swap copies there, if as much again stays free for a step."""
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 2 * num_bytes:
        return weights
    return {name: tensor.to(device) for name, tensor in weights.items()}


def _receive(source: DistributedWeights, device: torch.device) -> dict[str, Tensor]:
    """Receive weights from the trainer, in a process group of the two, into the memory of `device`."""
    for entry in source.entries:
        _check_entry(entry)
    check_places(source.entries)
    end = max(entry.offset + entry.num_bytes for entry in source.entries)
    is_aligned = all(entry.offset % DTYPES[entry.dtype].itemsize == 0 for entry in source.entries)
    if source.num_bytes % BLOCK_BYTES or end > source.num_bytes or not is_aligned:
        raise WeightUpdateError(
            f"the weights do not lie within the {source.num_bytes} bytes sent; the manifest is damaged"
        )
    data = torch.empty(source.num_bytes, dtype=torch.uint8, device=device)
    request = Request(what=source.name, group=secrets.token_hex(8), num_members=1)
    host, port = source.host, source.port
    try:
        receive(
            host, port, request, data, bucket_bytes=source.bucket_bytes, device=data.device, timeout_s=source.timeout_s
        )
    except (RuntimeError, ValueError) as error:
        raise WeightUpdateError(
            f"the trainer at {host}:{port} did not send the weights: {error}; is it running?"
        ) from error
    found = checksum(data)
    if found != source.checksum:
        raise WeightUpdateError(
            f"the weights that came have checksum {found:#010x} and their record says {source.checksum:#010x}; they "
            "were damaged on their way: publish them again"
        )
    return dict(tensors_over(data, [asdict(entry) for entry in source.entries]))


def _take_folder(source: DiskWeights) -> dict[str, Tensor]:
    try:
        parts = [load(data) for data in take_folder(source).values()]
        return {name: _checked(name, tensor) for part in parts for name, tensor in part.items()}
    except (ValueError, KeyError, SafetensorError) as error:
        raise WeightUpdateError(
            f"cannot read the weights in {source.path!r}: {error}; they must be safetensors"
        ) from error


def _read_folder(folder: Path) -> dict[str, Tensor]:
    try:
        return {name: tensor for file in weight_files(folder) for name, tensor in _read_file(folder / file).items()}
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise WeightUpdateError(
            f"cannot read weights from {str(folder)!r}: {error}; it must be a Hugging Face folder with safetensors"
        ) from error


def _read_file(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt", device="cpu") as file:  # pyright: ignore[reportUnknownVariableType]
        return {name: _checked(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def _checked(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"{name!r} is stored as {tensor.dtype}, and weights must be one of {', '.join(DTYPES)}")
    return tensor


def _read_shared_memory(weights: SharedMemoryWeights) -> dict[str, Tensor]:
    """Tensors over the bytes, which they keep alive."""
    for entry in weights.entries:
        _check_entry(entry)
    data = take_shared_memory(weights)
    return {
        entry.name: torch.frombuffer(
            data.data, dtype=DTYPES[entry.dtype], count=math.prod(entry.shape), offset=entry.offset
        ).view(entry.shape)
        for entry in weights.entries
    }


def _check_entry(entry: TensorEntry) -> None:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightUpdateError(f"{entry.name!r} has dtype {entry.dtype!r}; it must be one of {', '.join(DTYPES)}")
    expected = math.prod(entry.shape) * dtype.itemsize
    if entry.num_bytes != expected or min(entry.shape, default=1) <= 0:
        raise WeightUpdateError(
            f"{entry.name!r} says {entry.num_bytes} bytes for shape {entry.shape} of {entry.dtype}, "
            f"which take {expected}; the manifest is damaged"
        )
