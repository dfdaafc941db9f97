"""What a sandbox is asked for and what it reports: `Limits`, `Network`, `SandboxSpec`, `ExecResult`.

Every backend takes and returns these records. `relative_parts` and `folder_parts` check paths within a sandbox.
"""

import errno
import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Self

from areal_agent.errors import SandboxError

WEB_PORTS = (80, 443)


FRACTIONS = ("wall_s", "cpu_s", "cpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The resources that one program may use.

    >>> Limits(wall_s=2.0).max_cpu_s
    2
    """

    wall_s: float = 5.0
    cpu_s: float | None = None  # per process, rounded up to whole seconds; None: the same as `wall_s`
    memory_bytes: int = 256 * 2**20  # address space of each process, or memory of all where a backend counts it
    file_bytes: int = 16 * 2**20  # length of each file that the program writes
    open_files: int = 128
    output_bytes: int = 64 * 2**10  # stdout and stderr together
    # None means the backend's own bound. A backend that cannot enforce one of these refuses a number for it.
    cpus: float | None = None  # number of CPUs' worth of time, for all processes together
    pids: int | None = None  # processes and threads at once
    disk_bytes: int | None = None  # of the whole sandbox, not of one program
    inodes: int | None = None  # files and folders, of the whole sandbox

    def __post_init__(self) -> None:
        for limit in fields(self):
            name, value = limit.name, getattr(self, limit.name)
            kind, what = ((int, float), "number") if name in FRACTIONS else (int, "whole number")
            if value is not None and not (isinstance(value, kind) and 0 < value < 2**63):
                raise ValueError(f"Limits.{name} is {value!r}; give a positive {what} below 2**63")

    @property
    def max_cpu_s(self) -> int:
        """The CPU limit in the kernel's unit, whole seconds."""
        return math.ceil(self.wall_s if self.cpu_s is None else self.cpu_s)

    def check_within(self, sandbox: "Limits") -> None:
        """Raise ValueError if these limits of one program change what holds for its whole sandbox."""
        for name in ("disk_bytes", "inodes"):
            if getattr(self, name) not in (None, getattr(sandbox, name)):
                raise ValueError(f"Limits.{name} holds for a whole sandbox; give it in SandboxSpec.limits")


class Isolation(StrEnum):
    """The separation between a program and its host, weakest first."""

    NONE = "none"
    PROCESS = "process"  # a process of its own with resource limits, on the host's file system and network
    NAMESPACES = "namespaces"
    CONTAINER = "container"
    VM = "vm"

    def covers(self, wanted: "Isolation") -> bool:
        """Return whether this is at least as strong as `wanted`."""
        order = list(Isolation)
        return order.index(self) >= order.index(wanted)


class Access(StrEnum):
    """The part of the network that a sandbox may reach."""

    NONE = "none"
    ALLOW = "allow"  # only the hosts in a list
    FULL = "full"  # every public host, but never this machine or its private networks


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The hosts that a sandbox may reach. Make one with `none`, `allow` or `full`.

    A host is a name or an address, with a port or, without one, for ports 80 and 443. A name that resolves to a private
    address is refused: an address of this machine or its neighbours must be listed as an address.

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
        """Return whether a connection to this host name or textual address is allowed."""
        return self.access is Access.FULL or (plain_host(host), port) in self.hosts


def plain_host(host: str) -> str:
    """Return a host name or address in its canonical spelling."""
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
        raise ValueError(
            f"network host {text!r} is not valid; give 'name', 'name:port', an address or '[address]:port'"
        )
    return [(name, int(port))] if port else [(name, web) for web in WEB_PORTS]


NEEDED = {"setup": "commands", "startup": "a program and its arguments"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """The things that a sandbox starts with. A backend that cannot give one refuses it with `SandboxError`."""

    image: str | None = None  # of containers; None: the backend's own image
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # by path in the working directory
    setup: Sequence[str] = ()  # shell commands, run once before the sandbox is handed out
    setup_wall_s: float = 60.0  # per command
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # added to PATH, HOME and TMPDIR
    user: str | None = None  # None: the backend's own user, which is not root
    workdir: str | None = None  # an absolute path; None: the backend's own working directory
    is_writable: bool = False  # of containers: all of the image can be changed, if the user may; the user may be root
    may_trace: bool = False  # of containers: programs may trace each other, as debuggers do
    startup: Sequence[str] = ()  # a service, started after the set-up, that lives as long as the sandbox
    ready: str | None = None  # a shell command, tried until it succeeds; then the sandbox is handed out
    ready_wall_s: float = 60.0  # of all tries together
    limits: Limits | None = None  # None: the pool's limits
    network: Network | None = None  # None: no network, where the backend can shut it off
    runtime: str | None = None  # of containers, for example `runsc`
    min_isolation: Isolation = Isolation.NONE  # a weaker backend refuses the spec

    def __post_init__(self) -> None:
        for name in ("setup", "startup"):
            if isinstance(value := getattr(self, name), str):
                raise ValueError(f"SandboxSpec.{name} is {value!r}; give a list of {NEEDED[name]}")
        for name, kind in (("limits", Limits), ("network", Network)):
            if not isinstance(value := getattr(self, name), kind | None):
                raise ValueError(f"SandboxSpec.{name} is {value!r}; give a {kind.__name__}")
        object.__setattr__(self, "min_isolation", Isolation(self.min_isolation))  # which may be its text

    def cell(self, limits: Limits) -> "CellSpec":
        """Return what the cell starts with; `limits` apply when the spec names none."""
        shared: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(CellSpec)}
        shared["limits"] = self.limits or limits
        return CellSpec(**shared)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSpec:
    """The part of a `SandboxSpec` that must be known when a cell starts. The pool's stock keeps cells by it."""

    limits: Limits
    image: str | None = None
    user: str | None = None
    workdir: str | None = None
    is_writable: bool = False
    may_trace: bool = False
    network: Network | None = None
    runtime: str | None = None

    @property
    def has_network(self) -> bool:
        """Whether programs reach a network. `Network.none()` asks that they do not, which not all backends can give."""
        return self.network is not None and self.network.access is not Access.NONE

    def refuse(self, backend: str, *names: str) -> None:
        """Raise SandboxError when the spec asks for any of the fields `names`."""
        for name in names:
            if (value := getattr(self, name)) not in (None, False):
                raise SandboxError(
                    f"SandboxSpec.{name} is {value!r}, and the {backend} backend cannot give it; "
                    "leave it out, or use another backend"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program to run: an executable with its arguments, or Python source that runs as `__main__`.

    Source runs in a process of its own, with the standard library and the modules of the working directory. An
    `argv[0]` that cannot be run ends as in a shell: exit code 127 or 126, the reason on stderr.
    """

    argv: tuple[str, ...] = ()
    source: str | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # added to the cell's PATH, HOME and TMPDIR
    cwd: str = "."  # relative to the working directory

    def __post_init__(self) -> None:
        if bool(self.argv) == (self.source is not None):
            raise ValueError(f"argv is {self.argv!r}; give the program and its arguments as a list of strings")


class Status(StrEnum):
    """The way a program ended. Only OK means that it ran to its end and exited with 0."""

    OK = "ok"
    NONZERO = "nonzero"  # it exited with another code
    SIGNALED = "signaled"  # a signal ended it, and none of the limits below explains why
    TIMEOUT = "timeout"  # it ran out of wall-clock or CPU time
    MEMORY = "memory"  # it ran out of memory
    PIDS = "pids"  # it started more processes than allowed
    DISK = "disk"  # it wrote more than allowed
    OUTPUT_LIMIT = "output_limit"  # it printed more than allowed; the output up to the limit is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """The end of a program and its output, as raw bytes that are never interpreted as a status.

    >>> result = ExecResult(status=Status.NONZERO, exit_code=3, stderr=b"no such city")
    >>> result.is_ok, result.stderr.decode()
    (False, 'no such city')
    """

    status: Status
    exit_code: int | None  # None when a signal ended it
    signal: int | None = None  # None when it exited
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False  # whether it printed more than is kept here
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0  # resident memory of the largest process
    oom_kills: int = 0  # processes that the kernel killed because memory ran out, where the backend can count them
    is_state_lost: bool = False  # of a run in a session: the state that earlier runs left is gone

    @property
    def is_ok(self) -> bool:
        return self.status is Status.OK


def relative_parts(path: str) -> tuple[str, ...]:
    """Split a path within a working directory into names; PermissionError if it leads outside or names nothing.

    >>> relative_parts("./data/input.txt")
    ('data', 'input.txt')
    """
    parts = folder_parts(path)
    if not parts:
        raise _refusal(path)
    return parts


def folder_parts(path: str) -> tuple[str, ...]:
    """Split the path of a folder, like `relative_parts`; the working directory itself is allowed."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise _refusal(path)
    return parts


def _refusal(path: str) -> PermissionError:
    return PermissionError(errno.EPERM, "give a path in the working directory, relative and without '..'", path)
