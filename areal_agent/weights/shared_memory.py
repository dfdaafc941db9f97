"""Hands weights to engines on the same host through two memory-mapped files, written in turn.

    slot 0 ◀─ write(version 1)        engines read slot 0
    slot 1 ◀─ write(version 2)        slot 0 stays as it is until version 3

The slot that was handed out last is never the one written to: an engine that is still copying it reads whole weights.
It knows nothing of engines and versions; what a reader needs is in the `SharedMemoryWeights` record.
"""

import mmap
import os
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from areal_agent.engine_types import SharedMemoryWeights, TensorEntry

ALIGNMENT_BYTES = 64
NUM_SLOTS = 2


def layout(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> tuple[TensorEntry, ...]:
    """Where each tensor of `model.named_parameters()` lies in a slot when stored as `dtype`. Tied weights come once."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, parameter in parameters:
        num_bytes = parameter.numel() * dtype.itemsize
        entries.append(
            TensorEntry(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=tuple(parameter.shape),
                offset=offset,
                num_bytes=num_bytes,
            )
        )
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries)


class SharedMemoryChannel:
    """The writing side. Its files have mode 0600 and are removed by `close`."""

    def __init__(self, directory: Path, entries: tuple[TensorEntry, ...]) -> None:
        """Make the slots in `directory` (on /dev/shm no byte reaches a disk), each large enough for `entries`."""
        self._entries = entries
        self._slots: list[_Slot] = []
        self._next = 0
        try:
            for _ in range(NUM_SLOTS):
                self._slots.append(_Slot(directory, entries[-1].offset + entries[-1].num_bytes))
        except OSError:
            self.close()
            raise

    def write(self, parameters: Mapping[str, Tensor]) -> SharedMemoryWeights:
        """Copy the parameters, converted to the layout's dtype, into the slot that was not handed out last.

        Raises ValueError when their names or shapes are not those of the layout.
        """
        check_parameters(self._entries, parameters)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        crc32 = 0
        for entry in self._entries:
            crc32 = slot.write(entry, parameters[entry.name], crc32)
        return SharedMemoryWeights(path=str(slot.path), entries=self._entries, crc32=crc32)

    def close(self) -> None:
        """Remove the files. An engine that has one mapped keeps its memory until it lets go."""
        for slot in self._slots:
            slot.close()


def check_parameters(entries: Iterable[TensorEntry], parameters: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless names and shapes are those of the layout."""
    expected = {entry.name: entry.shape for entry in entries}
    received = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if received != expected:
        wrong = sorted(dict(received.items() ^ expected.items()))
        raise ValueError(f"these parameters are not those of the channel's layout: {', '.join(wrong[:5])}")


class _Slot:
    """One mapped file."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        fd, path = tempfile.mkstemp(prefix="weights-", suffix=".bin", dir=directory)  # mode 0600
        self.path = Path(path)
        try:
            os.truncate(fd, num_bytes)
            if sys.platform == "linux":  # a full /dev/shm is an error here, not a SIGBUS at the first write
                os.posix_fallocate(fd, 0, num_bytes)
            self._memory = mmap.mmap(fd, num_bytes)
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(fd)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, entry: TensorEntry, parameter: Tensor, crc32: int) -> int:
        """Copy one tensor and return the checksum continued over its bytes."""
        place = self._tensor[entry.offset : entry.offset + entry.num_bytes]
        place.view(getattr(torch, entry.dtype)).view(entry.shape).copy_(parameter.detach())
        return zlib.crc32(place.numpy().data, crc32)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
