"""Weights as bytes in one piece, on any device: their checksum, and tensors over them.

Runs in vLLM's workers too, which have no areal_agent: standard library and torch alone. It knows no model.
"""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 4096
"""Such a piece is a whole number of blocks."""


def whole_blocks(num_bytes: int) -> int:
    """The size of a piece for so many bytes.

    >>> whole_blocks(4097)
    8192
    """
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def checksum(data: Tensor) -> int:
    """Of bytes `[n]`, read once where they lie: a CRC-32 of the sums of all blocks."""
    words = data.view(torch.int32).view(-1, BLOCK_BYTES // 4)
    return zlib.crc32(words.sum(dim=1, dtype=torch.int64).cpu().numpy().tobytes())


def tensors_over(data: Tensor, entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """By name; an entry has the fields of `engine_types.TensorEntry`."""
    for entry in entries:
        part = data[entry["offset"] : entry["offset"] + entry["num_bytes"]]
        yield entry["name"], part.view(getattr(torch, entry["dtype"])).view(entry["shape"])
