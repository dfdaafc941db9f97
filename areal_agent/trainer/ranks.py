"""A trainer of several processes, called ranks. Each has a host of its own, and all train together in a `Group`.

    main process ── client.py ─▶ rank 0 ◀─ calls ─┬─ rank 1        between the ranks: `Group`
                                        the same  └─ rank 2 ...
                                        commands

Whoever starts rank 0 starts the others, in the way that rank 0 says (`Ranks.calls`), and watches all of them.

A command that fails on one rank ends the other ranks, since their shared state is broken then. If a rank dies, rank 0
exits too, unless a command in progress has already reported it. Within a `Group`, every rank makes the same calls in
the same order. Rank 0 alone has the records of a step, and hands out shares of them; no rank ever holds all parameters.
"""

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from io import BufferedRWPair
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from areal_agent.callback import LOOPBACK, Callback
from areal_agent.dtype import computed_in
from areal_agent.errors import ConfigError, ProcessDied, TrainerDied
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.context import Context
from areal_agent.trainer.wire import Frame, RankCall, error_of, read_frame
from areal_agent.types import JsonObject

logger = logging.getLogger(__name__)
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

GRACE_S = 10.0
"""A rank gets this long to report failure, or to exit, after another one failed."""

STALLED_S = 600.0
"""The time-out of what ranks do together, or `trainer.startup_timeout_s` if that is longer. It is far more than one
rank waits for another in a step, and ends ranks that a network parted and nobody else ended."""


class Ranks:
    """The ranks of a trainer from 1 on, as rank 0 sees them.

    ::

        ranks = Ranks.expect(3, "10.0.0.7")
        ...                                    # somebody starts three processes in the way that `ranks.calls` says
        ranks.accept()
        with ranks.taking_part(command): ...
        ranks.close()
    """

    def __init__(self, ranks: Sequence["_Rank"] = ()) -> None:
        self._ranks = ranks
        self._broken_by = ""  # what failed in one command and ended the other ranks
        self._is_over = threading.Event()  # set when a rank's death needs no report any more

    @classmethod
    def expect(cls, count: int, address: str) -> Self:
        """Listen for the calls of `count` ranks at `address`, one of this machine. Raises OSError."""
        return cls([_Rank(number, address) for number in range(1, count + 1)])

    @property
    def calls(self) -> Sequence[RankCall]:
        """How ranks 1, 2, ... have to be started, so that they can call."""
        return [RankCall(options=rank.callback.options, variables=rank.callback.variables) for rank in self._ranks]

    def __len__(self) -> int:
        return len(self._ranks)

    def accept(self, are_expected: Callable[[], bool] = lambda: True) -> None:
        """Wait until all have called. Raises TrainerDied when they are no longer expected."""
        for rank in self._ranks:
            rank.accept(are_expected)
            # a daemon thread, because rank 0 may exit before the rank it watches
            threading.Thread(target=self._watch, args=(rank,), name=f"watch rank {rank.number}", daemon=True).start()

    @contextmanager
    def taking_part(self, command: Frame) -> Generator[None]:
        """Have the other ranks carry out `command` while this rank does so inside the context.

        Raises the error of whichever rank failed; TrainerDied when a rank is gone, and after any failure.
        """
        if self._broken_by:
            raise TrainerDied(f"a command failed, which ended this trainer's ranks; restart it: {self._broken_by}")
        own: Exception | None = None
        try:
            encoded = command.encode() if self._ranks else b""
            for rank in self._ranks:
                rank.send(encoded)
            yield
        except Exception as error:  # raised below, together with the errors of the others
            own = error
        failures = [rank.failure(timeout_s=GRACE_S if own else None) for rank in self._ranks]
        if (cause := _cause(own, failures)) is not None:
            self._broken_by = (str(cause) or type(cause).__name__) if self._ranks else ""
            self.close()
            if cause is not own:
                raise cause from own
            raise cause

    def close(self) -> None:
        """Close the sockets of the ranks, upon which they exit."""
        self._is_over.set()
        for rank in self._ranks:
            rank.close()

    def _watch(self, rank: "_Rank") -> None:
        """Exit when a rank is gone and nobody noticed, as when this rank waits for it in a collective for ever."""
        rank.read()
        if not self._is_over.wait(GRACE_S):
            logger.error("rank %d is gone; this trainer cannot continue without it and exits", rank.number)
            os._exit(1)


class _Rank:
    """The socket on which one rank calls. A thread reads its answers, and so notices its end during any work."""

    def __init__(self, number: int, address: str) -> None:
        self.number = number
        self.callback = Callback(address)
        self._socket: socket.socket | None = None
        self._answers: SimpleQueue[JsonObject | None] = SimpleQueue()  # None: it is gone

    def accept(self, are_expected: Callable[[], bool]) -> None:
        """Wait for its call. Raises TrainerDied."""
        try:
            self._socket = self.callback.accept(are_expected)
        except EOFError:
            raise TrainerDied(f"rank {self.number} of the trainer ended before it called; its log says why") from None
        self._file: BufferedRWPair = self._socket.makefile("rwb")

    def send(self, encoded: bytes) -> None:
        self._file.write(encoded)
        self._file.flush()

    def read(self) -> None:
        """Take its answers until it is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._answers.put(read_frame(self._file).header)
        self._answers.put(None)
        with contextlib.suppress(OSError):
            self._file.close()

    def failure(self, timeout_s: float | None) -> Exception | None:
        """Return the error of the last command; None if it succeeded or there is no answer after `timeout_s`."""
        try:
            answer = self._answers.get(timeout=timeout_s)
        except Empty:
            return None
        if answer is None:
            return TrainerDied(f"rank {self.number} of the trainer is gone; its log has its last messages")
        if "error" not in answer:
            return None
        return error_of(answer["error"], RuntimeError, f"rank {self.number} of the trainer failed")

    def close(self) -> None:
        self.callback.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which releases the thread that reads
            self._socket.close()


def _cause(own: Exception | None, failures: list[Exception | None]) -> Exception | None:
    """Choose the error to raise for those of rank 0 and the others; None when there are none.

    A dead rank explains everything else. An error that all ranks share is reported once. Otherwise all are reported,
    because one may only be a consequence of another, such as a collective that broke off.
    """
    others = [one for one in failures if one is not None]
    for kind in (ProcessDied, ConfigError):
        if told := [one for one in others if isinstance(one, kind)]:
            return told[0]
    different = [one for one in others if own is None or str(own) not in str(one)]
    if not different:
        return own
    return RuntimeError("\n".join(str(one) for one in [*different, *([f"rank 0: {own}"] if own else [])]))


def interface_of(address: str) -> str:
    """Return the name of the network interface of this machine that has an IP address. Raises ConfigError."""
    wanted = ipaddress.ip_address(address)
    for _, name in socket.if_nameindex():
        if name.startswith("lo") if wanted.is_loopback else wanted in _addresses_of(name):
            return name
    raise ConfigError(f"no network interface of this machine has the address {address}; check cluster.network")


SIOCGIFADDR = 0x8915
"""Linux's call for the IPv4 address of an interface."""


def _addresses_of(interface: str) -> Generator[IPAddress]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):  # it has none
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()))
        yield ipaddress.IPv4Address(answer[20:24])
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        if line.split()[-1] == interface:
            yield ipaddress.IPv6Address(bytes.fromhex(line[:32]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What a model computes in: its layers, and the rest, which is embeddings, the last norm and the output layer.

    Weights, sums of gradients and the optimiser are float32 in any case.
    """

    layers: torch.dtype = torch.float32
    rest: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: TrainerConfig, device: torch.device, hidden_size: int) -> Self:
        """Return what the config asks for on this device, with a model of this hidden size. Raises ConfigError."""
        is_gpu = device.type == "cuda"
        if config.fp32_lm_head and not is_gpu:
            raise ConfigError(
                "trainer.fp32_lm_head is true, but there is no GPU here, and on a CPU the output layer is float32 "
                "already; leave it out"
            )
        layers: torch.dtype = getattr(torch, computed_in(config.dtype, hidden_size, is_gpu=is_gpu))
        return cls(layers=layers, rest=layers if is_gpu and not config.fp32_lm_head else torch.float32)

    def policies(self) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """Return FSDP2's policy for a layer, whose outputs are what the rest computes in, and for the rest.

        What the rest is called with is a micro-batch, whose temperatures stay float32.
        """
        return (
            MixedPrecisionPolicy(param_dtype=self.layers, reduce_dtype=torch.float32, output_dtype=self.rest),
            MixedPrecisionPolicy(param_dtype=self.rest, reduce_dtype=torch.float32, cast_forward_inputs=False),
        )


FLOAT32 = Precision()


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that train together, as one of them sees them. `mesh` is None for one rank, which needs no FSDP2.

    With a `context`, neighbouring ranks share their rows and are one data rank together; all shard the parameters.
    A mesh of two dimensions has replicas of the model, each sharded over neighbouring ranks (HSDP).
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    context: Context | None = None
    data: dist.ProcessGroup | None = None  # this rank and its likes of the other data ranks; None: all ranks
    world: dist.ProcessGroup | None = None  # of all ranks; None: the default one

    @property
    def num_data_ranks(self) -> int:
        return self.size // (1 if self.context is None else self.context.size)

    @property
    def data_rank(self) -> int:
        return self.rank // (1 if self.context is None else self.context.size)

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
        device: torch.device,
        *,
        context_parallel: int = 1,
        replicas: int = 1,
        address: str = LOOPBACK,
        timeout_s: float = STALLED_S,
    ) -> Self:
        """Wait for the other ranks at `store`. Undo it with `leave`.

        Each `context_parallel` neighbours share their rows, and each `size / replicas` neighbours have one replica of
        the model. The ranks talk over the interface that has `address`, one of this machine. They have no key:
        whoever can listen in on that network, or connect there, can read the weights. On loopback these are the users
        of this machine.
        """
        interface = interface_of(address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if address != LOOPBACK:  # NCCL has one interface for all, and engines elsewhere may join it for weights
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        shape, names = ((size,), ("shard",)) if replicas == 1 else ((replicas, size // replicas), ("replica", "shard"))
        group = cls(rank=rank, size=size, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))
        if context_parallel == 1:
            return group
        shape = (size // context_parallel, context_parallel)
        both = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
        context = Context(group=both.get_group("context"), rank=rank % context_parallel, size=context_parallel)
        return replace(group, context=context, data=both.get_group("data"))

    def aside(self) -> Self:
        """Return the same ranks on the CPU, in process groups that a thread may use beside training. Collective."""
        if self.mesh is None:
            return self
        names = tuple(f"{name}_aside" for name in self.mesh.mesh_dim_names or ())
        # with names and a backend of its own, or torch would share the groups of an equal mesh
        own: Any = dict.fromkeys(names, "gloo")
        mesh = init_device_mesh("cpu", self.mesh.shape, mesh_dim_names=names, backend_override=own)
        return replace(self, mesh=mesh, world=dist.new_group(backend="gloo"))

    def leave(self) -> None:
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def sharing(self) -> Generator[None]:
        """Within the context, keep only this rank's rows of each parameter that a module is given.

        transformers gives a model its parameters one after the other, so no rank ever holds all of them.
        """
        if self.size == 1:
            yield
            return
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # or threads of transformers would read ahead
        only_rows: Any = self._only_rows
        hook = register_module_parameter_registration_hook(only_rows)
        try:
            yield
        finally:
            hook.remove()

    def _only_rows(self, _module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta or isinstance(parameter, DTensor):
            return None
        rows = nn.Parameter(self.rows(parameter.detach()), requires_grad=parameter.requires_grad)
        vars(rows).update(vars(parameter))  # where transformers notes what is loaded
        return rows

    def rows(self, tensor: Tensor) -> DTensor:
        """Return this rank's rows of a tensor that every rank has, divided as FSDP2 divides it."""
        assert self.mesh is not None, "one rank alone has all rows"
        placements = (Replicate(), Shard(0))[-self.mesh.ndim :]
        seen = distribute_tensor(tensor, self.mesh, placements, src_data_rank=None)
        own = seen.to_local().clone()  # a view would keep the whole tensor
        return DTensor.from_local(own, self.mesh, placements, run_check=False, shape=seen.shape, stride=seen.stride())

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a copy in the host's memory; of a sharded tensor this rank's rows, as rows in this group."""
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True)
        own, (shape, stride) = tensor.to_local().detach().to("cpu", copy=True), (tensor.shape, tensor.stride())
        return DTensor.from_local(own, self.mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

    def shard(self, layers: Sequence[nn.Module], whole: nn.Module | None, precision: Precision = FLOAT32) -> None:
        """Shard the parameters of a model over the ranks (FSDP2): each layer is one unit, and the rest is another.

        Without `whole` only the layers are sharded.
        A unit is cast to its precision when it is gathered, forward and backward, so there is never a second copy of
        the model. Gradients are summed in float32 over micro-batches and ranks, and not averaged, because token weights
        are fixed over the whole update.
        """
        if self.mesh is None:
            return
        of_layer, of_rest = precision.policies()
        units = [*((layer, of_layer) for layer in layers), *([] if whole is None else [(whole, of_rest)])]
        for module, policy in units:
            fully_shard(module, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
            assert isinstance(module, FSDPModule), "fully_shard makes it one"
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def scatter(self, parts: Sequence[Any] = ()) -> Any:
        """Return this data rank's part; rank 0 gives those of all."""
        if self.size == 1:
            return parts[0]
        mine: list[Any] = [None]
        each = [parts[rank * self.num_data_ranks // self.size] for rank in range(self.size)] if parts else None
        dist.scatter_object_list(mine, each, src=0)
        return mine[0]

    def collect(self, part: Any) -> list[Any]:
        """Return what each rank has, by rank, to rank 0; the others get nothing."""
        if self.size == 1:
            return [part]
        parts: list[Any] | None = None if self.rank else [None] * self.size
        dist.gather_object(part, parts, dst=0)
        return parts or []

    def told(self, word: Any = None) -> Any:
        """Return the word of rank 0. Collective."""
        said = [word]
        if self.size > 1:
            dist.broadcast_object_list(said, src=0, group=self.world)
        return said[0]

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every data rank, by rank. All ranks must give equally many."""
        if self.mesh is None:
            return [list(numbers)]
        ours = torch.tensor(numbers, dtype=torch.float64)
        rows = [torch.empty_like(ours) for _ in range(self.num_data_ranks)]
        dist.all_gather(rows, ours, group=self.data)
        return [row.tolist() for row in rows]


ALONE = Group()
"""The group of a trainer of one rank."""


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded over the ranks as one whole. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_apart(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return a module's parameters by name, and leave them on the meta device in it. Buffers go to `device`.

    So it can be copied and changed, and sharded, before `fill` gives it parameters again.
    """
    parameters = {name: one.detach() for name, one in module.named_parameters()}
    empty = {
        one: nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, empty[parameter])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, buffer.to(device))
    return parameters


def fill(module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Give a module these parameters: this rank's rows where it is sharded, else all of them. Collective."""
    names = {one: name for name, one in module.named_parameters()}  # tied ones by their first name
    given = {
        one: nn.Parameter(parameters[name] if isinstance(one, DTensor) else whole(parameters[name]))
        for one, name in names.items()
        if name in parameters
    }
    everywhere = module.named_parameters(remove_duplicate=False)
    module.load_state_dict({name: given[one] for name, one in everywhere if one in given}, strict=False, assign=True)
