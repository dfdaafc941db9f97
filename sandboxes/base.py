"""The nouns of sandboxes: limits, specs, results, and the protocols that every backend implements.

It knows no backend. A program's failure is an `ExecResult`; a sandbox that cannot run programs raises `SandboxError`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol


class Status(StrEnum):
    """How a program ended. OK alone means that it ran to its end and exited with 0."""

    OK = "ok"
    NONZERO = "nonzero"  # it exited with another code
    SIGNALED = "signaled"  # a signal ended it that none of the limits below explains
    TIMEOUT = "timeout"  # wall-clock or CPU time was over
    MEMORY = "memory"  # it failed for want of memory
    PIDS = "pids"  # it started more processes than allowed
    DISK = "disk"  # it wrote more than allowed
    OUTPUT_LIMIT = "output_limit"  # it printed more than allowed; what was printed until then is kept


class Isolation(StrEnum):
    """What stands between a program and its host, weakest first."""

    NONE = "none"
    PROCESS = "process"  # a process of its own with resource limits, on the host's files and network
    NAMESPACES = "namespaces"
    CONTAINER = "container"
    VM = "vm"

    def covers(self, wanted: "Isolation") -> bool:
        """Whether this is at least as strong as `wanted`."""
        order = list(Isolation)
        return order.index(self) >= order.index(wanted)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """What a sandbox starts with. A backend that cannot give what is asked refuses it with `SandboxError`."""

    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # by path in the working directory
    env: Mapping[str, str] = field(
        default_factory=dict[str, str]
    )  # beside PATH, HOME and TMPDIR; nothing of the host's
    limits: Limits | None = None  # None: the pool's
    min_isolation: Isolation = Isolation.NONE  # refused by a weaker backend


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """How a program ended and what it printed, as raw bytes: nothing in them is ever read as a status.

    >>> result = ExecResult(status=Status.NONZERO, exit_code=3, signal=None, stdout=b"", stderr=b"no such city",
    ...                     truncated=False, wall_s=0.01, cpu_s=0.01, peak_memory_bytes=9_000_000)
    >>> result.is_ok, result.stderr.decode()
    (False, 'no such city')
    """

    status: Status
    exit_code: int | None  # None when a signal ended it
    signal: int | None  # None when it exited
    stdout: bytes
    stderr: bytes
    truncated: bool  # whether it printed more than is kept here
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int  # resident, of its largest process
    oom_kills: int = 0  # processes that the kernel killed for want of memory, where the backend can count them

    @property
    def is_ok(self) -> bool:
        return self.status is Status.OK


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a backend promises on this machine, and what it is known not to stop."""

    backend: str
    isolation: Isolation
    enforces: tuple[str, ...]
    cannot_stop: tuple[str, ...]


class Sandbox(Protocol):
    """A working directory in which programs run; any number at once. It is gone after `close`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a program; `cwd` is relative to the working directory. Cancelling the call kills it.

        An `argv[0]` that cannot be run ends as in a shell: 127 or 126, the reason on stderr.
        """
        ...

    async def exec_python(self, source: str, *, stdin: bytes = b"", limits: Limits | None = None) -> ExecResult:
        """Run Python source as `__main__`, in a process of its own. Cancelling the call kills it."""
        ...

    async def read(self, path: str) -> bytes:
        """The bytes of a regular file in the working directory; SandboxError for anything else."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the working directory, folders included."""
        ...

    async def close(self) -> None:
        """Kill what runs in it and remove its files. Harmless when it is closed already."""
        ...


class Provider(Protocol):
    """Makes sandboxes of one backend."""

    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A fresh sandbox; raises SandboxError when the backend cannot give what `spec` asks."""
        ...

    async def close(self) -> None:
        """Close every sandbox and release what the backend holds. Harmless when it is closed already."""
        ...
