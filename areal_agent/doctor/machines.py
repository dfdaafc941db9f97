"""The machines that a run is examined for: this one or those described, and what of the run each of them holds.

On one machine the config says whose GPUs are which. On a Ray cluster (`cluster.kind`) no two processes share a GPU, and
a server is on one machine with all its GPUs. The trainer's ranks fill the first machines, then come the servers, and
rollout workers are spread: Ray may choose other machines, but needs as many. What computes on a CPU counts with the
first machine.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_agent.config import Config
from areal_agent.doctor.findings import GIB, MIB, Finding, State, gib, output_of
from areal_agent.doctor.model import ModelShape
from areal_agent.dtype import LARGE, computed_in, multiplies_bfloat16, slowness
from areal_agent.engine.config import EnginePlan
from areal_agent.process import machine_memory

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
ASKING_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This machine, or a description of one that is elsewhere. All GPUs count with the memory of the smallest.

    A cluster has `num_nodes` machines of this kind.
    """

    memory_bytes: int | None  # None: not described
    available_bytes: int | None = None  # memory free for new use now; None: not known
    num_gpus: int = 0
    gpu_bytes: int = 0
    is_elsewhere: bool = False  # then the next two describe it; here they are looked up
    shared_memory_bytes: int | None = None  # /dev/shm
    disk_bytes: int | None = None  # free on the disk of the runs
    num_nodes: int = 1

    def __str__(self) -> str:
        """The machine in a few words.

        >>> str(Machine(memory_bytes=16 * GIB, num_gpus=2, gpu_bytes=80 * GIB))
        '16.0 GiB of memory, 2 GPUs of 80.0 GiB'
        """
        described = {"memory": self.memory_bytes, "/dev/shm": self.shared_memory_bytes, "disk": self.disk_bytes}
        sizes = [f"{gib(size)} of {what}" for what, size in described.items() if size is not None]
        gpus = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)} of {gib(self.gpu_bytes)}" if self.num_gpus else "no GPU"
        return f"{self.num_nodes} machines, each with " * (self.num_nodes > 1) + ", ".join([*sizes, gpus])


async def this_machine() -> Machine:
    """Describe this machine, as far as that is possible without loading torch."""
    sizes = await _gpu_sizes()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        # the names in it may be of any kind, and GPUs count as equal
        sizes = sizes[: sum(name.strip() not in ("", "-1") for name in visible.split(","))]
    total, available = machine_memory()
    return Machine(memory_bytes=total, available_bytes=available, num_gpus=len(sizes), gpu_bytes=min(sizes, default=0))


def described(
    num_gpus: int,
    gpu_gib: float | None,
    memory_gib: float | None,
    shm_gib: float | None,
    disk_gib: float | None,
    num_nodes: int = 1,
) -> Machine:
    """Return a machine that is elsewhere, of which this is told."""
    sizes = (None if size is None else int(size * GIB) for size in (gpu_gib, memory_gib, shm_gib, disk_gib))
    gpu, memory, shm, disk = sizes
    machine = Machine(memory_bytes=memory, shared_memory_bytes=shm, disk_bytes=disk, is_elsewhere=True)
    return replace(machine, num_gpus=num_gpus, gpu_bytes=gpu or 0, num_nodes=num_nodes)


async def _gpu_sizes() -> list[int]:
    """Return the memory of each GPU of the machine; nothing without a driver that answers."""
    try:
        _, output, _ = await output_of(NVIDIA_SMI, ASKING_S)
    except OSError:  # a TimeoutError is one
        return []
    return [int(line) * MIB for line in output.split() if line.isdigit()]


def uses_gpu(device: str, machine: Machine) -> bool:
    """Return whether a device is a GPU; `auto` takes one where there is one."""
    return device == "cuda" or (device == "auto" and machine.num_gpus > 0)


@dataclass(frozen=True, slots=True)
class Share:
    """What one machine holds of a run. Ranks that use GPUs have one of the first each."""

    num_ranks: int
    num_training_gpus: int
    servers: tuple[range, ...]  # the GPUs of each; none on a CPU
    num_workers: int
    has_main: bool = True

    @property
    def num_gpus(self) -> int:
        """The number of GPUs up to the last one that is used."""
        return max([self.num_training_gpus, *(gpus.stop for gpus in self.servers)])

    def num_servers_on(self, gpu: int) -> int:
        """Return the number of servers with a shard on this GPU."""
        return sum(gpu in gpus for gpus in self.servers)


def shares_of(config: Config, machine: Machine) -> Sequence[Share]:
    """Return what each machine holds. On a cluster, ranks and servers that find no GPU are left out."""
    is_training, is_serving = (uses_gpu(one.device, machine) for one in (config.trainer, config.engine))
    plan, size = EnginePlan.of(config.engine), _gpus_of_server(config, machine)
    num_ranks, num_servers, num_workers = config.trainer.num_ranks, _num_started(config), config.rollout.workers
    if config.cluster.kind == "local":
        servers = tuple(plan.gpus_of(server) if is_serving else range(0) for server in range(num_servers))
        return [Share(num_ranks, num_ranks * is_training, servers, num_workers)]
    shares: list[Share] = []
    for number in range(machine.num_nodes):
        ranks = min(num_ranks, machine.num_gpus) if is_training else num_ranks
        first = ranks * is_training
        servers = min(num_servers, (machine.num_gpus - first) // size) if size else num_servers
        shares.append(
            Share(
                num_ranks=ranks,
                num_training_gpus=first,
                servers=tuple(range(first + size * one, first + size * (one + 1)) for one in range(servers)),
                num_workers=num_workers // machine.num_nodes + (number < num_workers % machine.num_nodes),
                has_main=number == 0,
            )
        )
        num_ranks, num_servers = num_ranks - ranks, num_servers - servers
    return shares


def without_room(config: Config, machine: Machine) -> str:
    """Return what finds no GPU on a cluster, as text. Missing GPUs of a single machine are named with their memory."""
    shares = shares_of(config, machine)
    left = {
        "trainer ranks": (config.trainer.num_ranks, sum(one.num_ranks for one in shares)),
        "engines": (_num_started(config), sum(len(one.servers) for one in shares)),
    }
    return ", ".join(f"{wanted - found} of {wanted} {what}" for what, (wanted, found) in left.items() if found < wanted)


def placement_findings(config: Config, machine: Machine) -> Sequence[Finding]:
    """Return a finding for the room on a cluster; nothing for one machine."""
    if config.cluster.kind == "local":
        found = f"cluster.kind is local, which uses one machine of {machine.num_nodes}"
        change = "set cluster.kind=ray, or leave --nodes out"
        return [Finding("placement", State.FAIL, found, change)] if machine.num_nodes > 1 else []
    shares, size = shares_of(config, machine), _gpus_of_server(config, machine)
    if left := without_room(config, machine):
        most = machine.num_nodes + config.trainer.num_ranks + _num_started(config)
        more = (replace(machine, num_nodes=number) for number in range(machine.num_nodes + 1, most + 1))
        enough = next((one.num_nodes for one in more if not without_room(config, one)), None)
        change = "lower trainer.num_ranks, engine.num_servers or its tensor parallelism"
        change += f", or take {enough} machines" if enough else f": a server needs {size} GPUs of one machine"
        return [Finding("placement", State.FAIL, f"no room for {left}", change)]
    ranks = [number for number, one in enumerate(shares) if one.num_ranks]
    servers = [number for number, one in enumerate(shares) if one.servers]
    num_free = sum(machine.num_gpus - one.num_gpus for one in shares)
    found = f"trainer ranks: {config.trainer.num_ranks} on {told(ranks)}; engines: {_num_started(config)} of {size} GPU"
    found += f"{'s' * (size != 1)} on {told(servers)}; GPUs left over: {num_free}"
    return [Finding("placement", State.OK, found)]


def dtype_finding(shape: ModelShape, config: Config, machine: Machine) -> Finding:
    """Report what engine and trainer compute in on this machine, and why."""
    number = shape.hidden_size
    places = {name: uses_gpu(getattr(config, name).device, machine) for name in ("engine", "trainer")}
    choices = {name: getattr(config, name).dtype for name in places}
    dtypes = {name: computed_in(choices[name], number, is_gpu=is_gpu) for name, is_gpu in places.items()}
    found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    if not all(places.values()):
        has = "multiplies bfloat16 natively" if multiplies_bfloat16() else "has no instructions for bfloat16"
        found += f"; this processor {has}, the model's hidden size is {number} ('auto' takes bfloat16 from {LARGE} on)"
    for name, dtype in dtypes.items():
        if slow := slowness(f"{name}.dtype", dtype, is_gpu=places[name]):
            return Finding("dtype", State.WARN, f"{found}; {slow}", f"leave out {name}.dtype")
    if len(set(dtypes.values())) > 1:
        found += "; log-probabilities of the two differ by some 0.03 nats"
        return Finding("dtype", State.WARN, found, "leave out engine.dtype and trainer.dtype, or make them equal")
    return Finding("dtype", State.OK, found)


def told(numbers: Sequence[int]) -> str:
    """Return the machines with these numbers, as text.

    >>> told([0]), told([0, 1])
    ('machine 0', 'machines 0, 1')
    """
    return f"machine{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _num_started(config: Config) -> int:
    return 0 if config.engine.urls or config.engine.url is not None else config.engine.num_servers


def _gpus_of_server(config: Config, machine: Machine) -> int:
    return EnginePlan.of(config.engine).num_gpus if uses_gpu(config.engine.device, machine) else 0
