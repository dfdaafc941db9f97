"""A trainer of several processes, called ranks: rank 0 starts the others, and all train together in a `Group`.

    main process ── client.py ─▶ rank 0 ─┬─ the same frame ─▶ rank 1        between the ranks: `Group`
                                         └─ the same frame ─▶ rank 2 ...

A command that fails on one rank ends the other ranks, since their shared state is broken then. If a rank dies, rank 0
exits too, unless a command in progress has already reported it. Within a `Group`, every rank makes the same calls in
the same order. Rank 0 alone has the records of a step, and hands out shares of them; no rank ever holds all parameters.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedRWPair
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from areal_agent.callback import Callback
from areal_agent.errors import ConfigError, ProcessDied
from areal_agent.process import LIFELINE_VARIABLE, how_it_ended
from areal_agent.trainer.config import TrainerConfig
from areal_agent.trainer.context import Context
from areal_agent.trainer.wire import Frame, error_of, read_frame

logger = logging.getLogger(__name__)
GRACE_S = 10.0
"""A rank gets this long to report failure, or to exit, after another one failed."""


class Ranks:
    """The ranks of a trainer from 1 on, as rank 0 sees them. Make them with `start`, end them with `close`."""

    def __init__(self, ranks: list["_Rank"]) -> None:
        self._ranks = ranks
        self._is_broken = False
        self._is_over = threading.Event()  # set when a rank's death needs no report any more
        for rank in ranks:  # daemon threads, because rank 0 may exit before the rank it watches
            threading.Thread(target=self._watch, args=(rank,), name=f"watch rank {rank.number}", daemon=True).start()

    @classmethod
    def start(cls, count: int) -> Self:
        """Start `count` processes, which write to this process's log and exit with it. Raises ProcessDied."""
        ranks: list[_Rank] = []
        try:
            for number in range(1, count + 1):
                ranks.append(_Rank(number))
            for rank in ranks:
                rank.accept()
        except (OSError, ProcessDied):
            for rank in ranks:
                rank.end(grace_s=0.0)
            raise
        return cls(ranks)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of ranks 1, 2, ..."""
        return tuple(rank.process.pid for rank in self._ranks)

    @contextmanager
    def taking_part(self, command: Frame) -> Generator[None]:
        """Have the other ranks carry out `command` while this rank does so inside the context.

        Raises the error of whichever rank failed; ProcessDied when a rank is gone.
        """
        if self._is_broken:
            raise ProcessDied("a command failed, which ended the other ranks of this trainer; restart the trainer")
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
            self._is_broken = bool(self._ranks)
            self.close(grace_s=0.0)
            if cause is not own:
                raise cause from own
            raise cause

    def close(self, grace_s: float = GRACE_S) -> None:
        """End the ranks, and wait until they have exited."""
        self._is_over.set()
        for rank in self._ranks:
            rank.end(grace_s)

    def _watch(self, rank: "_Rank") -> None:
        """Exit when a rank died and nobody noticed, as when this rank waits for it in a collective for ever."""
        how = rank.wait()
        if not self._is_over.wait(GRACE_S):
            logger.error("rank %d %s; this trainer cannot continue without it and exits", rank.number, how)
            os._exit(1)


class _Rank:
    """One process, the socket on which it called back, and its lifeline: a pipe that closes when rank 0 exits."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._callback = Callback()
        read_end, self._lifeline = os.pipe()
        files = (one.stream for one in logging.getLogger().handlers if isinstance(one, logging.FileHandler))
        log = next(files, None)  # None: where this process writes
        argv = [sys.executable, "-m", "areal_agent.trainer", *self._callback.options, "--rank", str(number)]
        try:
            self.process = subprocess.Popen(
                argv,
                env={**os.environ, **self._callback.variables, LIFELINE_VARIABLE: str(read_end)},
                stdout=log,
                stderr=log,
                pass_fds=(read_end,),
                start_new_session=True,  # signals to the group of rank 0 are for rank 0 alone
            )
        except OSError:
            self._callback.close()
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self._socket: socket.socket | None = None

    def accept(self) -> None:
        """Wait for its call. Raises ProcessDied."""
        try:
            self._socket = self._callback.accept(lambda: self.process.poll() is None)
        except EOFError:
            raise self._death() from None
        self._file: BufferedRWPair = self._socket.makefile("rwb")

    def send(self, encoded: bytes) -> None:
        self._file.write(encoded)
        self._file.flush()

    def failure(self, timeout_s: float | None) -> Exception | None:
        """Return the error of the last command; None if it succeeded or there is no answer after `timeout_s`."""
        assert self._socket is not None, "it has called back"
        self._socket.settimeout(timeout_s)
        try:
            answer = read_frame(self._file).header
        except TimeoutError:
            return None
        except (EOFError, OSError):
            return self._death()
        if "error" not in answer:
            return None
        return error_of(answer["error"], RuntimeError, f"rank {self.number} of the trainer failed")

    def _death(self) -> ProcessDied:
        return ProcessDied(f"rank {self.number} of the trainer {self.wait()}; the log has its last messages")

    def wait(self) -> str:
        """Wait until the process exits, and say how it did."""
        return how_it_ended(self.process.wait())

    def end(self, grace_s: float) -> None:
        self._callback.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
                self._file.close()
            self._socket.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """What a model computes in: its layers, and the rest, which is embeddings, the last norm and the output layer.

    Weights, sums of gradients and the optimiser are float32 in any case.
    """

    layers: torch.dtype = torch.float32
    rest: torch.dtype = torch.float32

    @classmethod
    def of(cls, config: TrainerConfig, device: torch.device) -> Self:
        """Return what the config asks for on this device."""
        by_device = "bfloat16" if device.type == "cuda" else "float32"
        layers: torch.dtype = getattr(torch, by_device if config.dtype == "auto" else config.dtype)
        return cls(layers=layers, rest=torch.float32 if config.fp32_lm_head else layers)

    def policies(self) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """Return FSDP2's policy for a layer, whose outputs are what the rest computes in, and for the rest."""
        return (
            MixedPrecisionPolicy(param_dtype=self.layers, reduce_dtype=torch.float32, output_dtype=self.rest),
            MixedPrecisionPolicy(param_dtype=self.rest, reduce_dtype=torch.float32),
        )


FLOAT32 = Precision()


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The ranks that train together, as one of them sees them. `mesh` is None for one rank that needs no FSDP2.

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
        rendezvous: Path,
        device: torch.device,
        *,
        context_parallel: int = 1,
        replicas: int = 1,
    ) -> Self:
        """Wait for the other ranks at the file `rendezvous`, whose path only they know. Undo it with `leave`.

        Each `context_parallel` neighbours share their rows, and each `size / replicas` neighbours have one replica of
        the model. All ranks are on one machine and talk over its loopback interface, where no other machine listens.
        """
        group = cls._of(rank, size, dist.FileStore(str(rendezvous), size), device, replicas)  # pyright: ignore[reportPrivateImportUsage]
        if context_parallel == 1:
            return group
        shape = (size // context_parallel, context_parallel)
        both = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context"))
        context = Context(group=both.get_group("context"), rank=rank % context_parallel, size=context_parallel)
        return replace(group, context=context, data=both.get_group("data"))

    @classmethod
    def of_one(cls, device: torch.device) -> Self:
        """Return a group of this process alone, whose FSDP2 casts parameters. Undo it with `leave`."""
        return cls._of(0, 1, dist.HashStore(), device)  # pyright: ignore[reportPrivateImportUsage]

    @classmethod
    def _of(cls, rank: int, size: int, store: dist.Store, device: torch.device, replicas: int = 1) -> Self:  # pyright: ignore[reportPrivateImportUsage]
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        shape, names = ((size,), ("shard",)) if replicas == 1 else ((replicas, size // replicas), ("replica", "shard"))
        return cls(rank=rank, size=size, mesh=init_device_mesh(device.type, shape, mesh_dim_names=names))

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
            assert precision == FLOAT32, "only FSDP2 casts parameters; use Group.of_one"
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
"""The group of a trainer of one rank that computes in float32."""


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded over the ranks as one whole. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
