"""Folders of safetensors: what one holds, without reading the numbers, and whether another fits in its place.

A server loads whatever a folder has: what is missing there keeps its old value, and what does not fit may end it.
So a folder is proved here before a server hears of it. Knows no torch, no server and no versions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal_agent.engine.fields import WireError, as_ids, as_object, decode_json, get
from areal_agent.engine.stored_weights import weight_files
from areal_agent.errors import WeightUpdateError

TIED_HEAD = "lm_head.weight"

ITEM_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file: its type by safetensors' name (`F32`), its shape, and its bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a Hugging Face folder. Raises WeightUpdateError for files that are not whole."""
    return {name: shape for file in _files(folder) for name, shape in read_file_shapes(file).items()}


def read_file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a file. Raises WeightUpdateError for one that is not whole."""
    try:
        with file.open("rb") as opened:
            tensors, header_bytes = _read_header(opened.read(_LENGTH_BYTES), opened.read)
        _check_whole(tensors, file.stat().st_size - header_bytes)
    except (OSError, WireError) as error:
        raise WeightUpdateError(
            f"cannot read weights from {str(file)!r}: {error}; it must be a whole safetensors file"
        ) from error
    return {name: tensor.shape for name, tensor in tensors.items()}


def _files(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in weight_files(folder)]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightUpdateError(f"cannot read the index of the weights in {str(folder)!r}: {error!r}") from error


def prove_fits(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, is_tied: bool, where: str
) -> None:
    """Raises WeightUpdateError unless these are the tensors that are expected, no more and no less.

    The head of a tied model is its embedding: whether it is saved again does not matter.
    """
    ignored = {TIED_HEAD} if is_tied else set[str]()
    missing = sorted(set(expected) - set(found) - ignored)
    unknown = sorted(set(found) - set(expected) - ignored)
    if missing or unknown:
        raise WeightUpdateError(
            f"the weights {where} lack {len(missing)} tensors {missing[:3]} and have {len(unknown)} that "
            f"the engine's model does not know {unknown[:3]}; publish the model that the engine loaded"
        )
    for name in set(found) & set(expected):
        if found[name] != expected[name]:
            raise WeightUpdateError(
                f"{name!r} has shape {found[name]} {where} and the engine's model has {expected[name]}; "
                "publish the model that the engine loaded"
            )


def encode_header(tensors: Mapping[str, StoredTensor]) -> bytes:
    """The beginning of a safetensors file. The bytes of the tensors follow, without gaps, in their order."""
    header = orjson.dumps(
        {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (tensor.start, tensor.end)}
            for name, tensor in tensors.items()
        }
    )
    padded = header.ljust(-(-len(header) // _LENGTH_BYTES) * _LENGTH_BYTES)
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded


def _read_header(length: bytes, read: Any) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a file and the number of bytes before theirs."""
    num_bytes = int.from_bytes(length, "little")
    if len(length) < _LENGTH_BYTES or num_bytes > _MAX_HEADER_BYTES:
        raise WireError("it does not begin with the length of a header")
    fields = as_object(decode_json(read(num_bytes)), "the header")
    tensors = {name: _decode_tensor(as_object(entry, name)) for name, entry in fields.items() if name != "__metadata__"}
    return tensors, _LENGTH_BYTES + num_bytes


def _decode_tensor(fields: Mapping[str, Any]) -> StoredTensor:
    offsets = as_ids(get(fields, "data_offsets", list), "data_offsets")
    if len(offsets) != 2:
        raise WireError(f"data_offsets is {offsets}; it must be a start and an end")
    tensor = StoredTensor(
        dtype=get(fields, "dtype", str),
        shape=as_ids(get(fields, "shape", list), "shape"),
        start=offsets[0],
        end=offsets[1],
    )
    if tensor.dtype not in ITEM_BYTES:
        raise WireError(f"it has a tensor of type {tensor.dtype!r}; it must be one of {', '.join(ITEM_BYTES)}")
    if tensor.end - tensor.start != math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]:
        raise WireError(f"a tensor of shape {tensor.shape} lies at bytes {tensor.start} to {tensor.end}")
    return tensor


def _check_whole(tensors: Mapping[str, StoredTensor], num_bytes: int) -> None:
    needed = max((tensor.end for tensor in tensors.values()), default=0)
    if num_bytes != needed or any(tensor.start < 0 for tensor in tensors.values()):
        raise WireError(f"its tensors take {needed} bytes and it has {num_bytes}: it was cut off or overwritten")
