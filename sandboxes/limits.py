"""What one program may use. It knows no backend."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one program may use.

    >>> Limits(wall_s=2.0).max_cpu_s
    2
    """

    wall_s: float = 5.0
    cpu_s: float | None = None  # of each process, rounded up to whole seconds; None: as `wall_s`
    memory_bytes: int = 256 * 2**20  # address space of each process; of all together where the backend can count them
    file_bytes: int = 16 * 2**20  # length of each file that it writes
    open_files: int = 128
    output_bytes: int = 64 * 2**10  # stdout and stderr together
    # None: the backend's own. A backend that cannot enforce one refuses a number for it.
    cpus: float | None = None  # share of the machine's CPUs, of all processes together
    pids: int | None = None  # processes and threads at once
    disk_bytes: int | None = None  # of the whole sandbox, not of one program
    inodes: int | None = None  # files and folders, of the whole sandbox

    def __post_init__(self) -> None:
        for limit in fields(self):
            name, value = limit.name, getattr(self, limit.name)
            if value is not None and not (0 < value < math.inf):
                raise ValueError(f"Limits.{name} is {value!r}; give a positive, finite number")

    @property
    def max_cpu_s(self) -> int:
        """The CPU limit in the kernel's unit, whole seconds."""
        return math.ceil(self.wall_s if self.cpu_s is None else self.cpu_s)
