"""Channels, through which the trainer hands its weights to engines.

`write(parameters)` of a channel copies the weights to where engines can read them and returns a record that tells
engines how. Parameters may come one at a time, so that nobody has to hold them all. What was written last stays
readable until the next write at least. `close` frees everything.

    SharedMemoryChannel   two memory-mapped files, written in turn, for engines on the same host
    DiskChannel           folders on disk, for hosts with too little shared memory, and for adapters
    DeviceChannel         memory of the trainer's GPU, for an engine on the same GPU
    DistributedChannel    torch.distributed: sent to each engine that asks, in a process group of the two; each rank of
                          the trainer has one, with its part of the weights
"""

import itertools
import logging
import mmap
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor

from areal_agent.engine.embedded.sharing import SharedBuffer
from areal_agent.engine.embedded.transfer import (
    Request,
    Store,
    ask,
    checksum,
    connect,
    next_request,
    open_store,
    refuse,
    send,
    whole_blocks,
)
from areal_agent.engine.foreign.weight_folders import (
    ADAPTER_WEIGHTS,
    CONFIG,
    PREFIX,
    AdapterForm,
    dtype_of,
    encode_header,
)
from areal_agent.engine.pushes import INDEX, WEIGHTS
from areal_agent.errors import unwritable
from areal_agent.files import MANIFEST, bring_to_disk, encode_manifest
from areal_agent.types import (
    DeviceWeights,
    DiskWeights,
    DistributedWeights,
    SharedMemoryWeights,
    TensorEntry,
    WeightPart,
)

logger = logging.getLogger(__name__)


ALIGNMENT_BYTES = 64
NUM_SLOTS = 2
MOST_SHARED_BYTES = 2**30
"""The most memory of a GPU that slots there may take from a train step; larger models have them in the host's."""
Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors by name; as pairs they may be made only when they are asked for."""


def layout(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> tuple[TensorEntry, ...]:
    """Compute where each tensor lies when stored as `dtype`, by default each as its own. Tied weights come once."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, parameter in parameters:
        stored = dtype or parameter.dtype
        num_bytes = parameter.numel() * stored.itemsize
        entries.append(
            TensorEntry(
                name=name,
                dtype=str(stored).removeprefix("torch."),
                shape=tuple(parameter.shape),
                offset=offset,
                num_bytes=num_bytes,
            )
        )
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(entries)


class SharedMemoryChannel:
    """Writes two memory-mapped files in turn. They have mode 0600 and are removed by `close`.

        slot 0 ◀─ write(version 1)        engines read slot 0
        slot 1 ◀─ write(version 2)        slot 0 stays as it is until version 3

    A slot that was just handed out is never the next to be written, so an engine that is still copying it reads whole
    weights.
    """

    def __init__(self, directory: Path, entries: tuple[TensorEntry, ...]) -> None:
        """Make the slots in `directory` (on /dev/shm nothing reaches a disk), each large enough for `entries`."""
        self._entries = entries
        self._slots: list[tuple[Path, Tensor]] = []  # the next one to be written first
        try:
            for _ in range(NUM_SLOTS):
                self._slots.append(_mapped_file(directory, entries[-1].offset + entries[-1].num_bytes))
        except OSError:
            self.close()
            raise

    def write(self, parameters: Parameters) -> SharedMemoryWeights:
        """Copy the parameters, converted to the layout's dtype, into the slot that was not handed out last.

        Raises ValueError when their names, shapes or order are not those of the layout.
        """
        path, data = self._slots[0]
        crc32 = 0
        for entry, parameter in fitting(self._entries, parameters):
            crc32 = zlib.crc32(_store(data, entry, parameter).numpy().data, crc32)
        self._slots.append(self._slots.pop(0))
        return SharedMemoryWeights(path=str(path), entries=self._entries, crc32=crc32)

    def close(self) -> None:
        """Remove the files. An engine that has one mapped keeps the memory until it unmaps it."""
        for path, _ in self._slots:
            path.unlink(missing_ok=True)


class DeviceChannel:
    """Writes two buffers in memory of the trainer's device in turn, from which an engine there copies (sharing.py).

    As with shared memory, what was handed out last stays while the next set is written: an engine that was started anew
    is brought to it first. One that is still copying what is overwritten finds another checksum.
    """

    def __init__(self, entries: tuple[TensorEntry, ...], device: torch.device, folder: Path) -> None:
        """Make the buffers, on a CPU as files in `folder`. Raises what torch does where memory cannot be shared."""
        self._entries = entries
        num_bytes = entries[-1].offset + entries[-1].num_bytes
        self._slots = [SharedBuffer(num_bytes, device, folder) for _ in range(NUM_SLOTS)]  # the next to write first

    def write(self, parameters: Parameters) -> DeviceWeights:
        """Copy the parameters into the buffer that was not handed out last, and wait for the copy.

        Raises ValueError if they do not fit.
        """
        shared = self._slots[0]
        for entry, parameter in fitting(self._entries, parameters):
            _store(shared.data, entry, parameter)
        digest = checksum(shared.data)
        self._slots.append(self._slots.pop(0))
        return DeviceWeights(handle=shared.handle, device=shared.device, entries=self._entries, checksum=digest)

    def close(self) -> None:
        """Give the memory back."""
        for shared in self._slots:
            shared.close()


def fitting(entries: Sequence[TensorEntry], parameters: Parameters) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Yield each tensor with its place. Raises ValueError unless names, shapes and order are those of the layout."""
    pairs = iter(
        cast(Iterable[tuple[str, Tensor]], parameters.items() if isinstance(parameters, Mapping) else parameters)
    )
    for entry in entries:
        name, tensor = next(pairs, (entry.name, None))
        if tensor is None or (name, tuple(tensor.shape)) != (entry.name, entry.shape):
            raise _unfit(entry.name)
        yield entry, tensor
    for name, _ in pairs:
        raise _unfit(name)


def _unfit(name: str) -> ValueError:
    return ValueError(f"the parameters do not fit the channel's layout, see {name}; write those of the same model")


def _mapped_file(directory: Path, num_bytes: int) -> tuple[Path, Tensor]:
    """Make a file with mode 0600 and return its bytes, uint8 [n]."""
    fd, name = tempfile.mkstemp(prefix="weights-", suffix=".bin", dir=directory)
    try:
        os.truncate(fd, num_bytes)
        if sys.platform == "linux":  # report a full /dev/shm here, not as a SIGBUS at the first write
            os.posix_fallocate(fd, 0, num_bytes)
        return Path(name), torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(fd)


def _store(data: Tensor, entry: TensorEntry, parameter: Tensor, *, start: int = 0) -> Tensor:
    """Copy a tensor to its place in `data`, and return the bytes there.

    If `data` is the part of a set that starts at byte `start`, only what lies within is copied.
    """
    dtype = getattr(torch, entry.dtype)
    begin = min(max(entry.offset, start), start + len(data))
    end = max(begin, min(entry.offset + entry.num_bytes, start + len(data)))
    place = data[begin - start : end - start]
    numbers = slice((begin - entry.offset) // dtype.itemsize, (end - entry.offset) // dtype.itemsize)
    place.view(dtype).copy_(parameter.detach().reshape(-1)[numbers])
    return place


def write_adapter(folder: Path, matrices: Mapping[str, Tensor], form: AdapterForm) -> None:
    """Write adapters in PEFT's format. The matrices are whole, and named as in the model: `...q_proj.lora_A.weight`."""
    named = {PREFIX + name: one.detach().to("cpu").contiguous() for name, one in matrices.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_bytes(form.encode())


FILE_BYTES = 5 * 2**30
"""A model's files are not larger than this, unless one tensor is."""


def write_model(folder: Path, entries: Sequence[TensorEntry], parameters: Parameters) -> None:
    """Write tensors as a Hugging Face folder's safetensors files, one tensor after the other, with an index if several.

    Raises ValueError unless names, shapes and order are those of the layout.
    """
    files: list[list[TensorEntry]] = []
    for entry in entries:
        if not files or sum(one.num_bytes for one in files[-1]) + entry.num_bytes > FILE_BYTES:
            files.append([])
        files[-1].append(entry)
    name_of = "model-{:05d}-of-{:05d}.safetensors" if len(files) > 1 else WEIGHTS
    tensors = fitting(entries, parameters)
    index: dict[str, str] = {}
    for number, inside in enumerate(files, start=1):
        name = name_of.format(number, len(files))
        index |= dict.fromkeys((entry.name for entry in inside), name)
        with (folder / name).open("wb") as file:
            file.write(encode_header((entry.name, dtype_of(entry), entry.shape) for entry in inside))
            for entry, tensor in itertools.islice(tensors, len(inside)):
                stored = tensor.detach().to("cpu", getattr(torch, entry.dtype)).contiguous()
                file.write(stored.flatten().view(torch.uint8).numpy().data)
    next(tensors, None)  # raises where there are more
    if len(files) > 1:
        total = {"total_size": sum(entry.num_bytes for entry in entries)}
        (folder / INDEX).write_bytes(orjson.dumps({"metadata": total, "weight_map": index}))


NUM_KEPT = 2


class DiskChannel:
    """Writes each set of weights to a folder of its own and keeps the last two.

        directory/weights_000002/   model.safetensors, manifest.json     handed out last
        directory/weights_000001/   ...                                  an engine may still be reading it

    A folder is written under a hidden name, synced to disk, then renamed, so a folder with a final name is complete,
    and it never changes.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        adapter: AdapterForm | None = None,
        entries: Sequence[TensorEntry] | None = None,
    ) -> None:
        """Write into `directory`, which only this channel uses: adapters if `adapter` describes them.

        Tensors are stored as `entries` (from `layout`) say, and without them as `dtype`.
        """
        self._directory = directory
        self._dtype = dtype
        self._entries = entries
        self._adapter = adapter
        self._written: list[Path] = []
        self._number = 0

    def write(self, parameters: Parameters) -> DiskWeights:
        """Write the parameters into a new folder, and remove all but the last two.

        Raises ValueError if they do not fit the layout, DiskFull or ArealAgentError if they cannot be written.
        """
        self._number += 1
        folder = self._directory / f"weights_{self._number:06d}"
        hidden = folder.with_name(f".{folder.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            hidden.mkdir(parents=True, mode=0o700)
            self._fill(hidden, parameters)
            hidden.rename(folder)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise unwritable(folder, error) from error
            raise
        self._written.append(folder)
        while len(self._written) > NUM_KEPT:
            shutil.rmtree(self._written.pop(0))
        return DiskWeights(path=str(folder))

    def close(self) -> None:
        """Remove the folders."""
        for folder in self._written:
            shutil.rmtree(folder, ignore_errors=True)
        self._written.clear()

    def _fill(self, folder: Path, parameters: Parameters) -> None:
        if self._adapter is not None:
            write_adapter(folder, {name: one.to(self._dtype) for name, one in dict(parameters).items()}, self._adapter)
        elif self._entries is not None:
            write_model(folder, self._entries, parameters)
        else:
            parameters = dict(parameters)
            write_model(folder, layout(parameters.items(), self._dtype), parameters)
        (folder / MANIFEST).write_bytes(encode_manifest(folder, {}))
        bring_to_disk(folder)


TIMEOUT_S = 60.0
"""Either side of a transfer waits this long for the other's next step."""
CLOSING_S = 5.0
"""`close` waits this long for transfers in progress."""
JOIN_S = 0.05


class DistributedChannel:
    """Sends the weights to each engine that asks, and holds one set of them, or a rank's part, between two writes.

        write ─▶ a copy in the trainer's memory, offered ─ DistributedWeights ─▶ engines ask, now or later
                 one thread waits for requests ─▶ a thread for each sends the copy in buckets, while training goes on

    An engine that dies or hangs only affects its own transfer. One that comes late, or was restarted, asks like the
    others. A transfer of an earlier copy that is in progress is completed.

    With several ranks each holds equally many bytes, whatever tensors they belong to.
    """

    def __init__(
        self,
        entries: tuple[TensorEntry, ...],
        device: torch.device,
        *,
        host: str,
        bucket_bytes: int,
        timeout_s: float = TIMEOUT_S,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Offer the weights that `entries` (from `layout`) describe at `host`, an address of this machine.

        Of `num_ranks` ranks, whose records `joined` puts together, this one offers its part.
        """
        self._entries = entries
        num_bytes = whole_blocks(entries[-1].offset + entries[-1].num_bytes)
        share = whole_blocks(-(-num_bytes // num_ranks))
        self._start = min(rank * share, num_bytes)
        self._num_bytes = min(share, num_bytes - self._start)
        self._device = device
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        store = open_store(host, timeout_s)
        self._store: Store | None = store
        self._port = store.port
        self._sending: list[threading.Thread] = []
        self._held: tuple[str, Tensor] | None = None
        self._listening = threading.Thread(target=self._listen, name="requests for weights", daemon=True)
        self._listening.start()

    def write(self, parameters: Parameters) -> DistributedWeights:
        """Copy the parameters and offer the copy from now on. Raises ValueError if they do not fit the layout.

        The record has this rank's part alone.
        """
        self._held = None  # freed before the same amount is allocated again
        data = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        for entry, parameter in fitting(self._entries, parameters):
            _store(data, entry, parameter, start=self._start)
        name = secrets.token_hex(16)
        digest = checksum(data)  # waits until the copy is complete
        self._held = (name, data)
        part = WeightPart(host=self._host, port=self._port, name=name, num_bytes=len(data), checksum=digest)
        return DistributedWeights(
            parts=(part,), entries=self._entries, bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s
        )

    def close(self) -> None:
        """Drop what was written last. Engines that wait for more of it get an error."""
        self._held = None
        ask(self._client(), None)
        self._listening.join()
        self._store = None  # closing the store ends all that wait for it
        deadline_s = time.monotonic() + CLOSING_S
        for thread in self._sending:
            while thread.is_alive() and time.monotonic() < deadline_s:
                thread.join(JOIN_S)  # a single long join was seen to block until its timeout

    def _listen(self) -> None:
        store = self._client()
        for number in itertools.count(1):
            try:
                request = next_request(store, number)
            except (TypeError, ValueError) as error:  # written by something that is not an engine
                logger.warning("request %d for weights cannot be read: %s", number, error)
                continue
            if request is None:
                return
            thread = threading.Thread(target=self._send, args=(request,), name="a transfer", daemon=True)
            self._sending = [*(one for one in self._sending if one.is_alive()), thread]
            thread.start()

    def _send(self, request: Request) -> None:
        held = self._held
        try:
            store = self._client()
            if held is None or not request.is_for(held[0]):
                refuse(store, request, "the trainer has newer weights and no longer offers these")
                return
            send(store, request, held[1], bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s)
        except Exception as error:  # the boundary of this thread: the other side sees the end of the group
            logger.warning("sending weights to %s failed: %s", request.group, error)

    def _client(self) -> Store:
        return connect(self._host, self._port, self._timeout_s)


def joined(written: Sequence[DistributedWeights]) -> DistributedWeights:
    """Return the record of what all ranks have written, by rank. A model may be too small for some to have a part."""
    parts = tuple(part for weights in written for part in weights.parts if part.num_bytes)
    return replace(written[0], parts=parts)
