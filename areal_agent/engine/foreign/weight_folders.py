"""Turns pushed weights into folders that a server loads, each published whole or not at all.

    shared memory ── copied, its checksum proved ──▶ hidden folder, manifest.json last ── rename ──▶ folders/PUSH_ID/
    a folder on a disk ── second names for its files ─▶ hidden folder ─────────────────── rename ──▶ folders/PUSH_ID/

A folder is proved by its manifest before a server is told of it. It stays as long as a server is told to serve it,
whatever becomes of what was pushed: one that fails at the next weights, and at those after them, is given these again.
Knows no server, no version and no torch.
"""

import asyncio
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from areal_agent.cancellation import uninterrupted
from areal_agent.engine.foreign.tensors import StoredTensor, encode_header
from areal_agent.engine.stored_weights import WEIGHTS
from areal_agent.engine_types import CudaWeights, DiskWeights, SharedMemoryWeights, TensorEntry
from areal_agent.errors import WeightUpdateError
from areal_agent.manifest import MANIFEST, encode_manifest, read_manifest

_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PIECE_BYTES = 2**24


class WeightFolders:
    """Makes the folder of a push once, however many servers take it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_users: dict[Path, int] = {}  # of the folders made here

    async def take(self, push_id: str, weights: SharedMemoryWeights | DiskWeights | CudaWeights) -> Path:
        """A proved folder with these weights, until its `release`. Raises WeightUpdateError."""
        if isinstance(weights, CudaWeights):
            raise WeightUpdateError(
                "the weights lie in the memory of a GPU, which this server does not take them from; set "
                "trainer.transfer to 'shared_memory' or 'disk'"
            )
        folder = Path(weights.path).parent / "folders" / push_id
        async with self._lock:
            if folder not in self._num_users:
                await self._make(weights, folder)
            self._num_users[folder] = self._num_users.get(folder, 0) + 1
        try:
            await asyncio.to_thread(prove_manifest, folder)
        except BaseException:
            await self.release(folder)
            raise
        return folder

    async def _make(self, weights: SharedMemoryWeights | DiskWeights, folder: Path) -> None:
        """Of a call that is cancelled nothing is left, also later: the same push may come again."""
        try:
            await uninterrupted(asyncio.to_thread(publish, weights, folder))
        except asyncio.CancelledError:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def release(self, folder: Path) -> None:
        """A server that took this folder needs it no more; what was not made here stays."""
        async with self._lock:
            if folder not in self._num_users:
                return
            self._num_users[folder] -= 1
            if not self._num_users[folder]:
                del self._num_users[folder]
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def publish(weights: SharedMemoryWeights | DiskWeights, folder: Path) -> None:
    """Make `folder`. Raises WeightUpdateError, and then there is no such folder."""
    hidden = folder.with_name(f".{folder.name}")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True, mode=0o700)
        if isinstance(weights, DiskWeights):
            shutil.copytree(weights.path, hidden, copy_function=_name_again, dirs_exist_ok=True)
        else:
            _copy(weights, hidden / WEIGHTS)
            (hidden / MANIFEST).write_bytes(encode_manifest(hidden, {}))
        os.replace(hidden, folder)
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot turn the weights in {weights.path!r} into the folder {str(folder)!r}: {error}"
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def prove_manifest(folder: Path) -> None:
    """Raises WeightUpdateError unless every file is what the manifest of the folder says."""
    try:
        digests, _ = read_manifest(folder)
        for name, digest in digests.items():
            if not digest.is_of_file(folder / name):
                raise ValueError(f"{name} is not what was written: it differs from the manifest")
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot take weights from {str(folder)!r}: {error}; a folder is pushed whole, with its manifest"
        ) from error


def _name_again(source: str, target: str) -> None:
    """A file that is pushed is never written to again, so that it need not be copied, where the disk has such names."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def _copy(weights: SharedMemoryWeights, target: Path) -> None:
    """Write the tensors as one safetensors file. Raises WeightUpdateError when they are not what their record says."""
    with Path(weights.path).open("rb") as source:
        mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
    crc32 = 0
    with mapped, memoryview(mapped) as memory, target.open("wb") as file:
        file.write(encode_header(_stored(weights.entries)))
        for entry in weights.entries:
            if not 0 <= entry.offset <= len(memory) - entry.num_bytes:
                raise WeightUpdateError(f"{entry.name!r} lies outside of {weights.path!r}; its record is damaged")
            for piece in _pieces(entry):
                with memory[piece] as data:
                    crc32 = zlib.crc32(data, crc32)
                    file.write(data)
    if crc32 != weights.crc32:
        raise WeightUpdateError(
            f"the weights in {weights.path!r} have checksum {crc32:#010x} and their record says {weights.crc32:#010x}; "
            "they were damaged or overwritten while being read: publish them again"
        )


def _stored(entries: tuple[TensorEntry, ...]) -> dict[str, StoredTensor]:
    """Where the tensors lie in the file: one after the other, without the gaps that they have in memory."""
    stored: dict[str, StoredTensor] = {}
    start = 0
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise WeightUpdateError(f"{entry.name!r} has dtype {entry.dtype!r}; it must be one of {', '.join(_DTYPES)}")
        end = start + entry.num_bytes
        stored[entry.name] = StoredTensor(dtype=_DTYPES[entry.dtype], shape=entry.shape, start=start, end=end)
        start = end
    return stored


def _pieces(entry: TensorEntry) -> Iterator[slice]:
    end = entry.offset + entry.num_bytes
    for start in range(entry.offset, end, _PIECE_BYTES):
        yield slice(start, min(start + _PIECE_BYTES, end))
