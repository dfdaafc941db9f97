"""The pushes of weights that one engine takes: one at a time, each whole or not at all.

    begin ──▶ send ──▶ commit(version)      the old version serves until the commit, then the new one
      │         │         │
      └─────────┴─────────┴──▶ abort, or any failure: the old version keeps serving, and the next push may begin

`send` copies the weights into memory of the engine's own and verifies them while it samples, so it does not matter what
happens to the sender or its files afterwards. A sender that was silent for `timeout_s` may be dead: the next `begin`
replaces its push. Until then a second push is refused, and if the sender has paused the engine for its commit, nobody
else can resume it.

Versions only go up. The current version may be pushed again with the same weights, which has no effect.
"""

import asyncio
import contextlib
import logging
import math
import os
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from areal_agent.errors import PushConflict, WeightUpdateError
from areal_agent.files import no_device, read_manifest
from areal_agent.types import DiskWeights, DistributedWeights, SharedMemoryWeights, TensorEntry, Weights, WeightVersion

T = TypeVar("T")
Bytes = NDArray[np.uint8]
logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 60.0


class PushTarget(Protocol[T]):
    """An engine that serves `version` and takes pushed weights. A `T` is a set that has been read and verified."""

    @property
    def version(self) -> WeightVersion: ...

    async def take(self, weights: Weights) -> T:
        """Read and verify a set of weights while the engine works. Raises WeightUpdateError."""
        ...

    async def holds(self, taken: T) -> bool:
        """Return whether these are the weights that serve."""
        ...

    async def swap(self, taken: T, version: WeightVersion, *, flush_cache: bool) -> None:
        """Serve these weights from now on."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class _Push(Generic[T]):
    id: str
    heard_s: float  # when its sender last called
    taken: T | None = None
    is_sending: bool = False
    is_pausing: bool = False  # its sender waits for the engine to pause
    is_holding: bool = False  # its sender has paused the engine


class Pushes(Generic[T]):
    """The pushes of one engine, of which at most one is open. Use it from one event loop."""

    def __init__(self, target: PushTarget[T], *, timeout_s: float = PUSH_TIMEOUT_S) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._open: _Push[T] | None = None
        self._committing: set[_Push[T]] = set()
        self.swapping = asyncio.Lock()  # one change of weights at a time; also for a change that is not a push

    def begin(self, push_id: str) -> None:
        """Open a push. Raises PushConflict while another push is open whose sender may be alive."""
        if self._open is not None and self._open.id != push_id:
            self._give_up_if_dead(self._open)
        self._open = _Push(id=push_id, heard_s=time.monotonic())

    async def send(self, push_id: str, weights: Weights) -> None:
        """Take and verify all weights of a push. Raises WeightUpdateError, which ends the push."""
        push = self._find(push_id)
        if push.is_sending or push.taken is not None:
            raise PushConflict(f"push {push_id!r} has been sent its weights already; commit it, or begin another one")
        push.is_sending = True
        try:
            push.taken = await self._target.take(weights)
        except BaseException:
            if self._open is push:
                self._open = None
            raise
        push.is_sending, push.heard_s = False, time.monotonic()

    async def commit(self, push_id: str, version: WeightVersion, *, flush_cache: bool) -> None:
        """Serve what was sent as `version`. Raises WeightUpdateError, which ends the push."""
        push = self._find(push_id)
        if push.taken is None:
            raise PushConflict(f"push {push_id!r} has been sent no weights yet; a commit comes after the send")
        self._open = None
        self._committing.add(push)
        try:
            async with self.swapping:
                if not await self._is_repeated(push.taken, version):
                    await self._target.swap(push.taken, version, flush_cache=flush_cache)
        finally:
            self._committing.remove(push)

    @contextlib.contextmanager
    def hold(self, push_id: str | None) -> Generator[None]:
        """Mark the push as holding the engine, which the caller pauses inside. Ignored unless that push is open."""
        push = self._open
        if push is None or push.id != push_id:
            yield
            return
        push.is_pausing = push.is_holding = True
        try:
            yield
        finally:
            push.is_pausing, push.heard_s = False, time.monotonic()

    def let_go(self, push_id: str | None) -> None:
        """End the hold on the engine, as a step of this push or, with None, of no push.

        Raises PushConflict while another push holds the engine whose sender may be alive."""
        for push in self._committing:
            if push.is_holding and push.id != push_id:
                raise PushConflict(f"push {push.id!r} is being committed and holds the engine paused; try again")
        push = self._open
        if push is not None and push.is_holding:
            if push.id != push_id:
                self._give_up_if_dead(push)
                self._open = None
            push.is_holding = False

    def abort(self, push_id: str) -> None:
        """Forget a push. A push that is not open is no error."""
        if self._open is not None and self._open.id == push_id:
            self._open = None

    def _give_up_if_dead(self, push: _Push[T]) -> None:
        left_s = push.heard_s + self._timeout_s - time.monotonic()
        if push.is_sending or push.is_pausing or left_s > 0:
            held = " and holds the engine paused" if push.is_holding else ""
            raise PushConflict(
                f"push {push.id!r} is open{held}; commit or abort it first. It may be replaced once its sender has "
                f"been silent for {self._timeout_s:g} s, in {max(left_s, 0):.0f} s"
            )
        logger.warning("push %r is given up: its sender has been silent for %g s", push.id, self._timeout_s)

    def _find(self, push_id: str) -> _Push[T]:
        if self._open is None or self._open.id != push_id:
            raise PushConflict(
                f"push {push_id!r} is not open: it was never begun, has failed or ended, or another one has replaced "
                "it; begin it again"
            )
        self._open.heard_s = time.monotonic()
        return self._open

    async def _is_repeated(self, taken: T, version: WeightVersion) -> bool:
        """Return whether they serve already. Raises WeightUpdateError for a version that is not later."""
        serving = self._target.version
        if version > serving:
            return False
        if version == serving and await self._target.holds(taken):
            return True
        others = " with other weights" if version == serving else ""
        raise WeightUpdateError(
            f"version {version} was pushed, but {serving} serves{others}; versions only go up: push a later one"
        )


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes of stored weights, with the bytes of a number. Copying casts them to the model's own dtype."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def take_shared_memory(weights: SharedMemoryWeights) -> Bytes:
    """Read the whole file and verify its checksum. Raises WeightUpdateError."""
    check_layout(weights.entries)
    num_bytes = max(entry.offset + entry.num_bytes for entry in weights.entries)
    try:
        with Path(weights.path).open("rb") as file:
            num_file_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > num_file_bytes:
                raise ValueError(f"it has {num_file_bytes} bytes of {num_bytes}: file or manifest is damaged")
            data = np.empty(num_bytes, dtype=np.uint8)
            file.readinto(data.data)  # a file that is truncated meanwhile fails the checksum
    except (OSError, ValueError) as error:
        raise WeightUpdateError(
            f"cannot read the weight file {weights.path!r}: {error}; engine and trainer must share a host"
        ) from error
    crc32 = 0
    for entry in weights.entries:
        crc32 = zlib.crc32(data[entry.offset : entry.offset + entry.num_bytes].data, crc32)
    if crc32 != weights.crc32:
        raise WeightUpdateError(
            f"the weights in {weights.path!r} have checksum {crc32:#010x} and the manifest says "
            f"{weights.crc32:#010x}; they were damaged or overwritten while being read: publish them again"
        )
    return data


def check_layout(entries: Sequence[TensorEntry]) -> None:
    """Raise WeightUpdateError if this layout is impossible."""
    if not entries:
        raise WeightUpdateError("the new weights have no tensors; publish the model that the engine loaded")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightUpdateError(f"{twice!r} is listed twice: the manifest is damaged; publish the weights again")
    for entry in entries:
        if entry.dtype not in DTYPE_BYTES:
            raise WeightUpdateError(
                f"{entry.name!r} has dtype {entry.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}"
            )
        expected = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        if entry.num_bytes != expected or min(entry.shape, default=1) <= 0:
            raise WeightUpdateError(
                f"{entry.name!r} says {entry.num_bytes} bytes for shape {entry.shape} of {entry.dtype}, "
                f"which take {expected}; the manifest is damaged"
            )
        if entry.offset < 0 or entry.offset % DTYPE_BYTES[entry.dtype]:
            raise WeightUpdateError(
                f"{entry.name!r} lies at byte {entry.offset}: the manifest is damaged; publish the weights again"
            )


def take_folder(weights: DiskWeights) -> Mapping[str, bytes]:
    """Read the safetensors files of a folder, verified by its manifest. Raises WeightUpdateError.

    The manifest's other files only need to have their full size, so that an incomplete folder is refused.
    """
    folder = Path(weights.path)
    try:
        digests, _ = read_manifest(folder)
        for name, digest in digests.items():
            if (folder / name).stat().st_size != digest.num_bytes:
                raise ValueError(f"{name} does not have the size in its manifest")
        taken: dict[str, bytes] = {}
        for name in weight_files(folder):
            data = (folder / name).read_bytes()
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
    """Return the names of a Hugging Face folder's safetensors files."""
    index = folder / INDEX
    if not index.exists():
        return [WEIGHTS]
    fields: dict[str, Any] = orjson.loads(no_device(index).read_bytes())
    return sorted(set(fields["weight_map"].values()))


def size_of(weights: Weights) -> int:
    """Return the number of bytes of a push. Unreadable files count as 0; loading them reports the error."""
    match weights:
        case DiskWeights():
            return size_of_folder(Path(weights.path))
        case DistributedWeights():
            return weights.num_bytes
        case _:
            return sum(entry.num_bytes for entry in weights.entries)


def size_of_folder(folder: Path) -> int:
    """Return the number of bytes of all files in a folder; 0 if they cannot be read."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0
