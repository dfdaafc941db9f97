"""The processes of the other ranks, as rank 0 sees them: it starts them, passes commands on, and ends them.

    main process ── client.py ─▶ rank 0 ─┬─ the same frame ─▶ rank 1        between the ranks: group.py
                                         └─ the same frame ─▶ rank 2 ...

A command that fails on one rank ends the others: what they share is in pieces then. A rank that dies by itself ends
rank 0 too, unless a command under way has told of it. It knows frames, not what they ask for.

The ranks that train together, as one of them sees them. It knows no model, no batch and no process.

Every rank makes the same calls in the same order. Sums and lists come out alike on all of them. A trainer of one rank
has `ALONE`, which speaks to nobody.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.process import LIFELINE_VARIABLE
from areal_agent.trainer.wire import Frame, read_frame

logger = logging.getLogger(__name__)


GRACE_S = 10.0
"""How long a rank may take to fail, or to end, when another has."""


class Ranks:
    """Ranks 1, 2, ... of a trainer. Make them with `start`, end them with `close`."""

    def __init__(self, ranks: list["_Rank"]) -> None:
        self._ranks = ranks
        self._is_broken = False
        self._is_over = threading.Event()  # a death is no news any more
        for rank in ranks:  # as daemons, for rank 0 may end before the one it watches
            threading.Thread(target=self._watch, args=(rank,), name=f"watch rank {rank.number}", daemon=True).start()

    @classmethod
    def start(cls, count: int) -> Self:
        """Start `count` processes, which log to where this one logs and end with it."""
        ranks: list[_Rank] = []
        try:
            for number in range(1, count + 1):
                ranks.append(_Rank(number))
        except OSError:
            for rank in ranks:
                rank.end(grace_s=0.0)
            raise
        return cls(ranks)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of ranks 1, 2, ..."""
        return tuple(rank.process_id for rank in self._ranks)

    @contextmanager
    def taking_part(self, command: Frame) -> Generator[None]:
        """Have the other ranks carry out `command` while this one does so inside.

        Raises what went wrong, here or there; ProcessDied when a rank is gone.
        """
        if self._is_broken:
            raise ProcessDied("the other ranks of this trainer were ended when a command failed; start it anew")
        own: Exception | None = None
        try:
            self._send(command)
            yield
        except Exception as error:  # told below, with what the others say
            own = error
        failures = [rank.failure(timeout_s=GRACE_S if own else None) for rank in self._ranks]
        if (cause := _cause(own, failures)) is not None:
            self._is_broken = bool(self._ranks)
            self.close(grace_s=0.0)
            if cause is not own:
                raise cause from own
            raise cause

    def _send(self, command: Frame) -> None:
        encoded = command.encode() if self._ranks else b""
        for rank in self._ranks:
            rank.send(encoded)

    def close(self, grace_s: float = GRACE_S) -> None:
        """End them, and wait until they are gone."""
        self._is_over.set()
        for rank in self._ranks:
            rank.end(grace_s)

    def _watch(self, rank: "_Rank") -> None:
        """End this process when a rank is gone and nothing has told of it, as in a collective that waits for ever."""
        how = rank.wait()
        if not self._is_over.wait(GRACE_S):
            logger.error("rank %d %s, and this trainer cannot go on without it", rank.number, how)
            os._exit(1)


class _Rank:
    """One process, its end of a socket pair, and its lifeline: a pipe that closes when rank 0 ends, however it does."""

    def __init__(self, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "areal_agent.trainer", "--fd", str(theirs.fileno()), "--rank", str(number)],
                    env={**os.environ, LIFELINE_VARIABLE: str(read_end)},
                    pass_fds=(theirs.fileno(), read_end),
                )
        except OSError:
            ours.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self._socket = ours
        self._file: BufferedRWPair = ours.makefile("rwb")

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, encoded: bytes) -> None:
        self._file.write(encoded)
        self._file.flush()

    def failure(self, timeout_s: float | None) -> Exception | None:
        """What befell it in the last command; None when it is well, or still at it after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        try:
            answer = read_frame(self._file).header
        except TimeoutError:
            return None
        except (EOFError, OSError):
            return ProcessDied(f"rank {self.number} of the trainer {self.wait()}; its last words are in the log")
        return _error_of(self.number, answer["error"]) if "error" in answer else None

    def wait(self) -> str:
        """Wait until it is gone; how it ended."""
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"

    def end(self, grace_s: float) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
            self._file.close()
        self._socket.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _error_of(number: int, error: dict[str, Any]) -> Exception:
    if error["type"] == ConfigError.__name__:
        return ConfigError(error["message"])
    where = "".join(f"\n    {line}" for line in error["traceback"])
    return RuntimeError(f"rank {number} of the trainer failed: {error['type']}: {error['message']}{where}")


def _cause(own: Exception | None, failures: list[Exception | None]) -> Exception | None:
    """What to tell of what went wrong on rank 0 and on the others; None when nothing did.

    A death explains all the rest. What went wrong everywhere alike is told once; otherwise one may be the echo of
    another, a collective that broke off, and all are told.
    """
    others = [one for one in failures if one is not None]
    for kind in (ProcessDied, ConfigError):
        if told := [one for one in others if isinstance(one, kind)]:
            return told[0]
    different = [one for one in others if own is None or str(own) not in str(one)]
    if not different:
        return own
    return RuntimeError("\n".join(str(one) for one in [*different, *([f"rank 0: {own}"] if own else [])]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Which rank this is, and of how many. `mesh` is there when there are several."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def join(cls, rank: int, size: int, rendezvous: Path, device: torch.device) -> Self:
        """Wait for the other ranks at the file `rendezvous`, which only they know. `leave` ends it.

        They are on one machine and speak over its loopback, where nobody else listens.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.FileStore(str(rendezvous), size)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        return cls(rank=rank, size=size, mesh=init_device_mesh(device.type, (size,)))

    def leave(self) -> None:
        if self.mesh is not None:
            dist.destroy_process_group()

    def shard(self, layers: Sequence[nn.Module], whole: nn.Module) -> None:
        """Spread the parameters of a model over the ranks (FSDP2): each of its layers, and the rest, by itself.

        Gradients add up over the ranks; nothing is divided, for a token's weight is fixed over the whole update.
        """
        if self.mesh is None:
            return
        for module in (*layers, whole):
            fully_shard(module, mesh=self.mesh, reshard_after_forward=True)
        for module in whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks of a tensor on the CPU."""
        if self.mesh is None:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, of which all have equally many, by rank."""
        if self.mesh is None:
            return [list(numbers)]
        ours = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(ours) for _ in range(self.size)]
        dist.all_gather(rows, ours)
        return [row.tolist() for row in rows]


ALONE = Group()
"""A trainer of one rank."""


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over the ranks, in one piece; every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
