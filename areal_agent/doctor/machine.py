"""The memory, GPUs and cores of this machine, found without loading torch."""

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
MIB = 2**20

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
ASKING_S = 20.0

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, in cgroup version 2 and 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine, this one or one that is planned for. All GPUs count with the memory of the smallest."""

    memory_bytes: int
    available_bytes: int | None = None  # memory free for new use now; None: not known
    num_gpus: int = 0
    gpu_bytes: int = 0

    @property
    def summary(self) -> str:
        """The machine in a few words.

        >>> Machine(memory_bytes=16 * GIB, num_gpus=2, gpu_bytes=80 * GIB).summary
        '16.0 GiB of memory, 2 GPUs of 80.0 GiB'
        """
        gpus = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)} of {gib(self.gpu_bytes)}" if self.num_gpus else "no GPU"
        return f"{gib(self.memory_bytes)} of memory, {gpus}"


async def this_machine() -> Machine:
    """Describe this machine, as far as that is possible without a library."""
    total, available = read_memory()
    gpus = visible_gpus(await _gpu_sizes())
    return Machine(
        memory_bytes=total,
        available_bytes=available,
        num_gpus=len(gpus),
        gpu_bytes=min(gpus, default=0),
    )


def read_memory() -> tuple[int, int | None]:
    """Return all memory that this process may have, and how much of it is free for new use (None where not known)."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = _available_bytes()
    limits = [limit for path in CGROUP_LIMITS if (limit := _read_number(path)) is not None]
    total = min([total, *limits])
    return total, None if available is None else min(total, available)


def visible_gpus(sizes: list[int]) -> list[int]:
    """Return the sizes of the GPUs that a process started here may use, by CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sizes
    numbers = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return sizes[: len(numbers)]  # the names in it may be of any kind, and GPUs count as equal


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gib(num_bytes: float) -> str:
    """Return a size as text.

    >>> gib(3 * GIB // 2), gib(5 * MIB)
    ('1.5 GiB', '5 MiB')
    """
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / MIB:.0f} MiB"


async def _gpu_sizes() -> list[int]:
    """Return the memory of each GPU of the machine; nothing without a driver."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return []
    process = await asyncio.create_subprocess_exec(
        *NVIDIA_SMI, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), ASKING_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return []
    return [int(line) * MIB for line in output.decode().split() if line.isdigit()]


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
