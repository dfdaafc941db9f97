"""Transfers weights as bytes over torch.distributed, in a process group of a trainer's rank and a server's processes.

    a server's processes, 1, 2, ...             the rank's store (TCP)                the rank, 0
    take a number each                      ─▶  GROUP/members
    the first one asks                      ─▶  request/N, the next one free     ─▶   waits for it, NEXT
    each names its GPU                      ─▶  GROUP/gpu/NUMBER                 ─▶   NCCL if all GPUs differ; else
                                                                                      gloo, over the hosts' memory
    wait for the answer                     ◀─  GROUP/answer                     ◀─   the backend, or a refusal
        ◀──────────────────────── bytes, bucket after bucket ────────────────────────

Each transfer has a group of its own, neither torch's default one nor the trainer's, so that a failure ends only that
transfer. Nobody waits longer than `timeout_s` for the next step of another. Several ranks have a part of the weights
each, which a server takes one after the other (`take`). Who asks has to prove that it knows the part's name, which only
engines are told. The last functions cover the bytes: their checksum, and tensors over them. This file also runs in
servers where areal_agent is not installed: use only the standard library and torch.
"""

import hmac
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor

BLOCK_BYTES = 4096
"""Weights travel as one piece, a whole number of blocks of this size."""

SUMMED_BLOCKS = 2**14
"""Blocks whose sums are made at once."""

TRAINER = 0
FROZEN = 2
"""After this many times `timeout_s` without a step, which should fail by itself sooner, the trainer counts as frozen.
"""
POLL_S = 0.001
"""Seconds between polls of a GPU transfer, for which torch would wait without a time limit."""

NEXT = "next"
"""The store's key for the number of the request that the trainer waits for. All earlier requests are written."""
LONG = timedelta(days=1)
"""A wait without an end. Torch logs two warnings for each wait that ends in vain, so it is long."""

c10d = cast(Any, torch.distributed)  # most of what is used here has no types
Store = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of one server's `num_members` processes to be sent some weights. `proof` shows that they know its name.

    >>> request = Request.of("name", group="group", num_members=1)
    >>> request.is_for("name"), request.is_for("another")
    (True, False)
    """

    proof: str
    group: str
    num_members: int

    @classmethod
    def of(cls, name: str, *, group: str, num_members: int) -> "Request":
        return cls(proof=_proof(name, group), group=group, num_members=num_members)

    def is_for(self, name: str) -> bool:
        """Return whether it asks for the weights of that name."""
        return hmac.compare_digest(self.proof, _proof(name, self.group))


def _proof(name: str, group: str) -> str:
    return hmac.digest(name.encode(), group.encode(), "sha256").hex()


# ------------------------------------------------------------------------------------------------- the store


def open_store(host: str, timeout_s: float) -> Store:
    """Open the trainer's store, at a free port of this address only."""
    listening = socket.create_server((host, 0), family=_family(host))
    port = listening.getsockname()[1]
    return _store(host, port, timeout_s, is_master=True, master_listen_fd=listening.detach())


def connect(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store. A waiting call blocks all other calls of the same client, so each user has its own."""
    return _store(host, port, timeout_s, is_master=False)


def ask(store: Store, request: Request | None) -> None:
    """Append a request to those in the store. None says that nobody needs to wait for another.

    Writing the request takes its number, so a process that dies in between leaves no number without a request.
    """
    told = json.dumps(asdict(request) if request else None).encode()
    number = int(store.get(NEXT))
    while store.compare_set(f"request/{number}", "", told) != told:
        number += 1


def next_request(store: Store, number: int) -> Request | None:
    """Wait for request `number`, counted from 1, without a time limit. Raises ValueError for an invalid one."""
    key = f"request/{number}"
    store.set(NEXT, str(number))
    while True:
        try:
            store.wait([key], LONG)
            break
        except c10d.DistStoreError:  # a time limit that nobody set
            continue
    told = json.loads(store.get(key))
    return None if told is None else Request(**told)


def refuse(store: Store, request: Request, why: str) -> None:
    """Tell the request's processes that nothing will come."""
    store.set(f"{request.group}/answer", json.dumps({"refused": why}))


def _store(host: str, port: int, timeout_s: float, **options: Any) -> Store:
    return c10d.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **options)


# -------------------------------------------------------------------------------------------------- transfers


def take(told: Mapping[str, Any], data: Tensor, *, group: str, num_members: int, device: torch.device) -> None:
    """Receive the weights that `told` describes (the fields of `types.DistributedWeights`) as `data`, and verify them.

    Like `receive`, in each process of a server; all give the same `group`, a random name. Servers begin with different
    parts, so that they do not all wait for the same rank. Raises RuntimeError or ValueError.
    """
    parts = told["parts"]
    places = data.split([part["num_bytes"] for part in parts])
    first = zlib.crc32(group.encode()) % len(parts)
    for number in range(first, first + len(parts)):
        part, place = parts[number % len(parts)], places[number % len(parts)]
        host, port = part["host"], part["port"]
        request = Request.of(part["name"], group=group, num_members=num_members)
        options: dict[str, Any] = {
            "bucket_bytes": told["bucket_bytes"],
            "device": device,
            "timeout_s": told["timeout_s"],
        }
        try:
            receive(host, port, request, place, **options)
        except RuntimeError as error:
            raise RuntimeError(
                f"the trainer at {host}:{port} did not send the weights: {error}; is it running?"
            ) from error
        if (found := checksum(place)) != part["checksum"]:
            raise ValueError(
                f"the weights that came from {host}:{port} have checksum {found:#010x} and their record says "
                f"{part['checksum']:#010x}; they were damaged on their way: publish them again"
            )


def receive(
    host: str, port: int, request: Request, data: Tensor, *, bucket_bytes: int, device: torch.device, timeout_s: float
) -> None:
    """Receive `data` in one process of a server. It lies on `device`, where the process computes, or in host memory.

    Raises RuntimeError when the trainer does not send it.
    """

    def steps() -> Iterator[None]:
        store = connect(host, port, timeout_s)
        yield
        number = store.add(f"{request.group}/members", 1)
        if number == 1:
            ask(store, request)
        store.set(f"{request.group}/gpu/{number}", gpu_uuid(device))
        answer = json.loads(store.get(f"{request.group}/answer"))
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        yield
        with _joined(store, request, answer["backend"], number, device, timeout_s) as group:
            for piece in data.split(bucket_bytes):
                group.receive(piece)
                yield

    _while_it_goes_on(steps(), FROZEN * timeout_s)


def _while_it_goes_on(steps: Iterator[None], timeout_s: float) -> None:
    """Take the steps in a thread, and give up when none ends for `timeout_s`.

    Torch waits without a limit for a store whose process is frozen; such a thread is abandoned.
    """
    told: SimpleQueue[Exception | bool] = SimpleQueue()

    def run() -> None:
        try:
            for _ in steps:
                told.put(False)
            told.put(True)
        except Exception as error:  # the boundary of this thread: the waiting caller raises it
            told.put(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    is_done: Exception | bool = False
    while not is_done:
        try:
            is_done = told.get(timeout=timeout_s)
        except Empty:
            raise RuntimeError(f"nothing came for {timeout_s:g} s") from None
    if isinstance(is_done, Exception):
        raise is_done


def send(store: Store, request: Request, data: Tensor, *, bucket_bytes: int, timeout_s: float) -> None:
    """Send `data` from the trainer to all processes of the request. Raises RuntimeError when one of them fails."""
    members = range(1, request.num_members + 1)
    gpus = [gpu_uuid(data.device), *(store.get(f"{request.group}/gpu/{number}").decode() for number in members)]
    backend = "nccl" if all(gpus) and len(set(gpus)) == len(gpus) else "gloo"
    store.set(f"{request.group}/answer", json.dumps({"backend": backend}))
    with _joined(store, request, backend, TRAINER, data.device, timeout_s) as group:
        for piece in data.split(bucket_bytes):
            group.send(piece)


class _Group:
    """Broadcasts from the trainer on one kind of device; data elsewhere goes through a buffer there."""

    def __init__(self, group: Any, device: torch.device, timeout_s: float) -> None:
        self._group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)

    def send(self, data: Tensor) -> None:
        self._broadcast(data if data.device.type == self._device.type else data.to(self._device))

    def receive(self, data: Tensor) -> None:
        if data.device.type == self._device.type:
            self._broadcast(data)
            return
        buffer = torch.empty_like(data, device=self._device)
        self._broadcast(buffer)
        data.copy_(buffer)

    def _broadcast(self, data: Tensor) -> None:
        options = c10d.distributed_c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = TRAINER, 0, self._timeout
        work = self._group.broadcast([data], options)
        if self._device.type == "cuda":
            self._wait_for_gpu(work)
        work.wait(self._timeout)

    def _wait_for_gpu(self, work: Any) -> None:
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"a bucket was not transferred within {self._timeout.total_seconds():g} s")
            time.sleep(POLL_S)


@contextmanager
def _joined(
    store: Store, request: Request, backend: str, number: int, device: torch.device, timeout_s: float
) -> Generator[_Group]:
    """Wait for the other processes and join their group until the end of the block."""
    ranks = c10d.PrefixStore(f"{request.group}/ranks", store)
    size, timeout = request.num_members + 1, timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(store.host, store.port))]
        group = c10d.ProcessGroupGloo(ranks, number, size, options)
        with _own_stream(device):
            yield _Group(group, torch.device("cpu"), timeout_s)
        return
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # one side's failure must not end the other
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = c10d.ProcessGroupNCCL(ranks, number, size, options)
    try:
        with _own_stream(device):
            yield _Group(group, device, timeout_s)
    finally:
        group.abort()  # all is done or has failed; a shutdown would wait for the one that failed


@contextmanager
def _own_stream(device: torch.device) -> Generator[None]:
    """Use a CUDA stream of our own on a GPU, and wait for its work at the end.

    It starts after what is already queued there, which may still use memory that was freed and taken again for this.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
    stream.synchronize()


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; empty for a CPU."""
    return str(cast(Any, torch.cuda.get_device_properties(device)).uuid) if device.type == "cuda" else ""


def _own_address(host: str, port: int) -> str:
    """The address of this machine from which that host is reached. Nothing is sent."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def whole_blocks(num_bytes: int) -> int:
    """The size of a piece that holds `num_bytes`.

    >>> whole_blocks(4097)
    8192
    """
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def checksum(data: Tensor) -> int:
    """The checksum of bytes `[n]`, read once where they lie: a CRC-32 of the sums of all blocks."""
    words = data.view(torch.int32).view(-1, BLOCK_BYTES // 4)
    parts = words.split(SUMMED_BLOCKS)  # torch makes int64 of all that it sums at once
    sums = torch.cat([part.sum(dim=1, dtype=torch.int64) for part in parts])
    return zlib.crc32(sums.cpu().numpy().tobytes())


def tensors_over(data: Tensor, entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by name over the bytes; each entry has the fields of `types.TensorEntry`."""
    for entry in entries:
        part = data[entry["offset"] : entry["offset"] + entry["num_bytes"]]
        yield entry["name"], part.view(getattr(torch, entry["dtype"])).view(entry["shape"])
