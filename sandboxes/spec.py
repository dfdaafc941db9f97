"""What is asked of a sandbox: isolation, network, and all that it starts with. It knows no backend.

What one program may use. It knows no backend.

How a program ended. It knows no backend.

Paths within a sandbox: relative to its working directory, and never out of it. It opens nothing.
"""

import errno
import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Self

from areal_agent.errors import SandboxError


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


WEB_PORTS = (80, 443)


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


class Access(StrEnum):
    """How much of the network."""

    NONE = "none"
    ALLOW = "allow"  # the hosts of a list
    FULL = "full"  # every public host; never this machine or its private networks


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """What a sandbox may reach. Make it with `none`, `allow` or `full`.

    A host is a name or an address, with a port or for the two of the web. A name that leads to a private address is
    not followed there: an address of this machine or its neighbours must be named as what it is.

    >>> network = Network.allow(["pypi.org", "10.0.0.7:8080"])
    >>> network.lets("pypi.org", 443), network.lets("pypi.org", 22), network.lets("10.0.0.7", 8080)
    (True, False, True)
    """

    access: Access
    hosts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def none(cls) -> Self:
        return cls(access=Access.NONE)

    @classmethod
    def allow(cls, hosts: Sequence[str]) -> Self:
        if isinstance(hosts, str) or not hosts:
            raise ValueError(f"hosts is {hosts!r}; give a list of 'name' or 'name:port'")
        return cls(access=Access.ALLOW, hosts=tuple(pair for host in hosts for pair in _host_and_ports(host)))

    @classmethod
    def full(cls) -> Self:
        return cls(access=Access.FULL)

    def lets(self, host: str, port: int) -> bool:
        """Whether a connection to this name, or address as text, is granted."""
        return self.access is Access.FULL or (plain_host(host), port) in self.hosts


def plain_host(host: str) -> str:
    """A name or address in the one way to write it."""
    bare = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare


def _host_and_ports(text: str) -> list[tuple[str, int]]:
    host, colon, port = text.rpartition(":")
    if not colon or host.count(":") != text.startswith("[") * host.count(":"):
        host, port = text, ""  # no port, or an IPv6 address without one
    name = plain_host(host)
    is_named = bool(name) and not set(name) & set("/@*?[] ")
    if not is_named or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise ValueError(f"network host {text!r} is none; give 'name', 'name:port', an address or '[address]:port'")
    return [(name, int(port))] if port else [(name, web) for web in WEB_PORTS]


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """What a sandbox starts with. A backend that cannot give what is asked refuses it with `SandboxError`."""

    image: str | None = None  # of containers; None: the backend's own
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # by path in the working directory
    setup: Sequence[str] = ()  # shell commands, run once, before the sandbox is handed out; a failure is an error
    setup_wall_s: float = 60.0  # of each
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # beside PATH, HOME, TMPDIR; nothing of the host's
    user: str | None = None  # None: the backend's own, which is not root
    workdir: str | None = None  # an absolute path; None: the backend's own
    limits: Limits | None = None  # None: the pool's
    network: Network | None = None  # None: none, where the backend can shut it off
    runtime: str | None = None  # of containers, for example `runsc`
    min_isolation: Isolation = Isolation.NONE  # refused by a weaker backend

    def __post_init__(self) -> None:
        if isinstance(self.setup, str):
            raise ValueError(f"SandboxSpec.setup is {self.setup!r}; give a list of commands")

    def cell(self, limits: Limits) -> "CellSpec":
        """What its cell starts with; `limits` are those of a spec that names none."""
        return CellSpec(
            image=self.image,
            user=self.user,
            workdir=self.workdir,
            limits=self.limits or limits,
            network=self.network,
            runtime=self.runtime,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSpec:
    """What of a `SandboxSpec` must be known when its cell is started. Cells are kept in stock by it."""

    limits: Limits
    image: str | None = None
    user: str | None = None
    workdir: str | None = None
    network: Network | None = None
    runtime: str | None = None

    def refuse(self, backend: str, *names: str) -> None:
        """SandboxError when one of these is asked for."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise SandboxError(
                    f"SandboxSpec.{name} is {value!r}, and the {backend} backend cannot give it; "
                    "leave it out, or use another backend"
                )


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
    is_state_lost: bool = False  # of a session's run: what the runs before it left is gone as well

    @property
    def is_ok(self) -> bool:
        return self.status is Status.OK


def relative_parts(path: str) -> tuple[str, ...]:
    """The names of a path within a working directory; PermissionError for one that leads out of it, or nowhere.

    >>> relative_parts("./data/input.txt")
    ('data', 'input.txt')
    """
    parts = folder_parts(path)
    if not parts:
        raise _refusal(path)
    return parts


def folder_parts(path: str) -> tuple[str, ...]:
    """As `relative_parts`, of a folder: the working directory itself is one."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise _refusal(path)
    return parts


def _refusal(path: str) -> PermissionError:
    return PermissionError(errno.EPERM, "give a path in the working directory, relative and without '..'", path)
