"""The ranks that train together, as one of them sees them. It knows no model, no batch and no process.

Every rank makes the same calls in the same order. Sums and lists come out alike on all of them. A trainer of one rank
has `ALONE`, which speaks to nobody.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


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
