"""Takes a stored set of weights into memory, and proves that its bytes are those that were written. Knows no tensor.

What is returned is this process's own: whatever becomes of the files, or of who wrote them, changes it no more.
"""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from areal_agent.engine_types import DiskWeights, SharedMemoryWeights, TensorEntry
from areal_agent.errors import WeightUpdateError
from areal_agent.manifest import read_manifest

Bytes = NDArray[np.uint8]

Spoil = Callable[[bytearray], None]
"""Changes bytes between their storage and the proof: how a test damages a transfer."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def take_shared_memory(weights: SharedMemoryWeights, spoil: Spoil | None = None) -> Bytes:
    """The whole file, its checksum found right. Raises WeightUpdateError."""
    check_places(weights.entries)
    num_bytes = max(entry.offset + entry.num_bytes for entry in weights.entries)
    try:
        with Path(weights.path).open("rb") as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > num_file_bytes:
                raise ValueError(f"it has {num_file_bytes} bytes of {num_bytes}: file or manifest is damaged")
            data = np.empty(num_bytes, dtype=np.uint8)
            file.readinto(data.data)  # a file that is cut short meanwhile fails the checksum
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot read the weight file {weights.path!r}: {error}; engine and trainer must share a host"
        ) from error
    if spoil is not None:
        spoiled = bytearray(data)
        spoil(spoiled)
        data = np.frombuffer(spoiled, dtype=np.uint8)
    _check_crc32(weights, data)
    return data


def check_places(entries: Sequence[TensorEntry]) -> None:
    """Raises WeightUpdateError where these cannot be the places of tensors."""
    if not entries:
        raise WeightUpdateError("the new weights have no tensor at all; publish the model that the engine loaded")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightUpdateError(f"{twice!r} is there twice; every tensor is sent once: the manifest is damaged")
    for entry in entries:
        if entry.offset < 0 or entry.num_bytes <= 0:
            raise WeightUpdateError(
                f"{entry.name!r} lies at byte {entry.offset} and has {entry.num_bytes} bytes; the manifest is damaged"
            )


def _check_crc32(weights: SharedMemoryWeights, data: Bytes) -> None:
    crc32 = 0
    for entry in weights.entries:
        crc32 = zlib.crc32(data[entry.offset : entry.offset + entry.num_bytes].data, crc32)
    if crc32 != weights.crc32:
        raise WeightUpdateError(
            f"the weights in {weights.path!r} have checksum {crc32:#010x} and the manifest says "
            f"{weights.crc32:#010x}; they were damaged or overwritten while being read: publish them again"
        )


def take_folder(weights: DiskWeights, spoil: Spoil | None = None) -> Mapping[str, bytes]:
    """The safetensors files of a folder, each proved by its manifest. Raises WeightUpdateError.

    What else the manifest names has to be there in full size: a folder that is half there is refused.
    """
    folder = Path(weights.path)
    try:
        digests, _ = read_manifest(folder)
        for name, digest in digests.items():
            if (folder / name).stat().st_size != digest.num_bytes:
                raise ValueError(f"{name} has not the size of which its manifest speaks")
        taken: dict[str, bytes] = {}
        for name in weight_files(folder):
            data = (folder / name).read_bytes()
            if spoil is not None:
                spoil(spoiled := bytearray(data))
                data = bytes(spoiled)
            if not digests[name].is_of(data):
                raise ValueError(f"{name} is not what was written: its SHA-256 differs from the manifest's")
            taken[name] = data
    except KeyError as error:
        raise WeightUpdateError(f"the manifest of {weights.path!r} does not name {error}; publish it again") from None
    except (OSError, TypeError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot take weights from {weights.path!r}: {error}; a folder is pushed whole, with its manifest"
        ) from error
    return taken


def weight_files(folder: Path) -> list[str]:
    """The names of a Hugging Face folder's safetensors."""
    index = folder / INDEX
    if not index.exists():
        return [WEIGHTS]
    fields: dict[str, Any] = orjson.loads(index.read_bytes())
    return sorted(set(fields["weight_map"].values()))
