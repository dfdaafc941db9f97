"""The pushes of weights that one engine takes: one at a time, all of it or nothing; and the proof of stored weights.

    begin ──▶ send ──▶ commit(version)      the old version serves until the commit; then the new one, whole
      │         │         │
      └─────────┴─────────┴──▶ abort, or any failure: the old version goes on, and the next push may begin

`send` copies the weights into the engine's own memory and proves them while it samples, so that whatever happens to the
sender or its files afterwards changes nothing. A sender that is silent for `timeout_s` may be dead, and the next
`begin` replaces its push. Until then a second push is refused, and if the sender has paused the engine for its commit,
nobody else may resume it.

Versions only go up. The serving version may be pushed again with the same weights: that changes nothing.
"""

import asyncio
import contextlib
import logging
import os
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from areal_agent.errors import PushConflict, WeightUpdateError
from areal_agent.files import read_manifest
from areal_agent.types import DiskWeights, DistributedWeights, SharedMemoryWeights, TensorEntry, Weights, WeightVersion

T = TypeVar("T")
logger = logging.getLogger(__name__)


PUSH_TIMEOUT_S = 60.0

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Bytes = NDArray[np.uint8]

Spoil = Callable[[bytearray], None]
"""Changes bytes between storage and proof: a test damages a transfer with it."""


class PushTarget(Protocol[T]):
    """The receiver of pushes. A `T` is a set of weights that has been read and proved."""

    @property
    def version(self) -> WeightVersion:
        """The version that serves."""
        ...

    async def take(self, weights: Weights) -> T:
        """Read and prove a set of weights while the engine works. Raises WeightUpdateError."""
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
    heard_s: float  # when its sender called last
    taken: T | None = None
    is_sending: bool = False
    is_pausing: bool = False  # its sender's pause is not done yet
    is_holding: bool = False  # its sender has paused the engine


class Pushes(Generic[T]):
    """The open push, if there is one. Use it from one event loop."""

    def __init__(self, target: PushTarget[T], *, timeout_s: float = PUSH_TIMEOUT_S) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._open: _Push[T] | None = None
        self._committing: set[_Push[T]] = set()
        self._swapping = asyncio.Lock()  # allows one change of weights at a time

    def begin(self, push_id: str) -> None:
        """Open a push. Raises PushConflict while another one is open whose sender may be alive."""
        if self._open is not None and self._open.id != push_id:
            self._give_up_if_dead(self._open)
        self._open = _Push(id=push_id, heard_s=time.monotonic())

    async def send(self, push_id: str, weights: Weights) -> None:
        """Take and prove all weights of a push. Raises WeightUpdateError, which ends the push."""
        push = self._find(push_id)
        if push.is_sending or push.taken is not None:
            raise PushConflict(f"push {push_id!r} has been sent its weights already; commit it, or begin another one")
        push.is_sending = True
        async with self._ended_by_failure(push):
            push.taken = await self._target.take(weights)
        push.is_sending, push.heard_s = False, time.monotonic()

    async def commit(self, push_id: str, version: WeightVersion, *, flush_cache: bool) -> None:
        """Serve the sent weights as `version`. Raises WeightUpdateError, which ends the push."""
        push = self._find(push_id)
        if push.taken is None:
            raise PushConflict(f"push {push_id!r} has been sent no weights yet; a commit comes after the send")
        self._open = None
        self._committing.add(push)
        try:
            async with self._swapping:
                if not await self._is_repeated(push.taken, version):
                    await self._target.swap(push.taken, version, flush_cache=flush_cache)
        finally:
            self._committing.remove(push)

    @contextlib.contextmanager
    def hold(self, push_id: str | None) -> Generator[None]:
        """Let the caller pause the engine inside the block. If this push is open, it holds the pause to its commit."""
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
        """Let the engine resume, as a step of this push or of none.

        Raises PushConflict while another push holds the pause whose sender may be alive.
        """
        for push in self._committing:
            if push.is_holding and push.id != push_id:
                raise PushConflict(f"push {push.id!r} is being committed, and the engine is paused for it; try again")
        push = self._open
        if push is not None and push.is_holding:
            if push.id != push_id:
                self._give_up_if_dead(push)
                self._open = None
            push.is_holding = False

    def abort(self, push_id: str) -> None:
        """Forget a push. One that is not open is no error."""
        if self._open is not None and self._open.id == push_id:
            self._open = None

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncGenerator[None]:
        """Keep commits out of the block: for a change of weights outside of a push."""
        async with self._swapping:
            yield

    def _give_up_if_dead(self, push: _Push[T]) -> None:
        left_s = push.heard_s + self._timeout_s - time.monotonic()
        if push.is_sending or push.is_pausing or left_s > 0:
            held = ", and it holds the engine's pause" if push.is_holding else ""
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

    @contextlib.asynccontextmanager
    async def _ended_by_failure(self, push: _Push[T]) -> AsyncGenerator[None]:
        try:
            yield
        except BaseException:
            if self._open is push:
                self._open = None
            raise

    async def _is_repeated(self, taken: T, version: WeightVersion) -> bool:
        """Return whether these weights serve already. Raises WeightUpdateError when the version would go back."""
        serving = self._target.version
        if version > serving:
            return False
        if version == serving and await self._target.holds(taken):
            return True
        raise WeightUpdateError(
            f"version {version} was pushed, and {serving} serves{' with other weights' * (version == serving)}; "
            "versions only go up: push a later one"
        )


def take_shared_memory(weights: SharedMemoryWeights, spoil: Spoil | None = None) -> Bytes:
    """Read the whole file and check its checksum. Raises WeightUpdateError."""
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
    """Raises WeightUpdateError where the entries cannot be places of tensors."""
    if not entries:
        raise WeightUpdateError("the new weights have no tensor at all; publish the model that the engine loaded")
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightUpdateError(f"{twice!r} is listed twice; the manifest is damaged")
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
    """Read a folder's safetensors files, each proved by the manifest. Raises WeightUpdateError.

    Other files in the manifest must be present in full size: an incomplete folder is refused.
    """
    folder = Path(weights.path)
    try:
        digests, _ = read_manifest(folder)
        for name, digest in digests.items():
            if (folder / name).stat().st_size != digest.num_bytes:
                raise ValueError(f"{name} does not have the size that its manifest says")
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
    """The names of a Hugging Face folder's safetensors files."""
    index = folder / INDEX
    if not index.exists():
        return [WEIGHTS]
    fields: dict[str, Any] = orjson.loads(index.read_bytes())
    return sorted(set(fields["weight_map"].values()))


def size_of(weights: Weights) -> int:
    """The bytes of a push. Unreadable files count as 0; the loader reports them."""
    match weights:
        case DiskWeights():
            return size_of_folder(Path(weights.path))
        case DistributedWeights():
            return weights.num_bytes
        case _:
            return sum(entry.num_bytes for entry in weights.entries)


def size_of_folder(folder: Path) -> int:
    """The bytes of all files in a folder."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0
