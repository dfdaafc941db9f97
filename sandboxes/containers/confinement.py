"""How a container is closed: from what is asked of a cell to the configuration that the engine is given.

Nothing of a spec reaches the configuration but what is named here: there is no way to ask for privileges, devices,
capabilities, mounts of the host or its namespaces. It starts nothing.

What bounds all programs of one container together: memory, processes, CPUs; as the program that runs asks for it.

As many programs run at once as there may be processes; others wait, first come first served, and not for ever, for all
of these have deadlines. A program that is talked with has none: it neither waits nor is waited for.

Whose a container is: labels that outlive its maker, and what is done when the maker is dead. It starts nothing.
"""

import asyncio
import posixpath
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from areal_agent.errors import SandboxError
from sandboxes.cgroups import DEFAULT_PIDS
from sandboxes.jail import DEFAULT_DISK_BYTES, DEFAULT_INODES
from sandboxes.owner import is_abandoned, own_tag
from sandboxes.spec import Access, CellSpec, Limits

WORKDIR = "/work"
DEFAULT_RUNTIME = "runc"
NOBODY = 65534
AGENT_BYTES = 32 * 2**20
"""The agent's own memory, and what the kernel keeps for it: beside that of the programs."""
AGENT_PIDS = 2
TUNNEL_BYTES = 24 * 2**20
"""Of the process that carries a container's connections, where there are any."""
SANDBOXED_BYTES, SANDBOXED_PIDS = 128 * 2**20, 256
"""Of a runtime that is a kernel of its own, such as gVisor's: it lives within the container's bounds."""
AGENT_CAPABILITIES = ("SETUID", "SETGID", "KILL")  # to become the programs' user, and to kill what is that user's
AGENT_OPEN_FILES = 4096
SHARES_OF_DISK = (("{workdir}", 12), ("/tmp", 3), ("/dev/shm", 1))
"""Sixteenths: each is a file system of its own, and together they are what `Limits.disk_bytes` and `inodes` allow."""
NOT_A_WORKDIR = ("/", "/proc", "/sys", "/dev", "/tmp", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """Who the programs are."""

    uid: int
    gid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What bounds all programs of a container together, and can be changed while it runs."""

    memory_bytes: int
    pids: int
    cpus: float | None

    @classmethod
    def of(cls, limits: Limits) -> "Bounds":
        return cls(memory_bytes=limits.memory_bytes, pids=limits.pids or DEFAULT_PIDS, cpus=limits.cpus)

    def config(self, spec: CellSpec) -> dict[str, Any]:
        """As the engine takes it, without swap, with what our own processes and the runtime need beside."""
        has_way_out, is_kernel = has_tunnel(spec), spec.runtime not in (None, DEFAULT_RUNTIME)
        memory_bytes = self.memory_bytes + AGENT_BYTES + TUNNEL_BYTES * has_way_out + SANDBOXED_BYTES * is_kernel
        return {
            "Memory": memory_bytes,
            "MemorySwap": memory_bytes,
            "PidsLimit": self.pids + AGENT_PIDS + has_way_out + SANDBOXED_PIDS * is_kernel,
            "NanoCpus": round((self.cpus or 0) * 1e9),
        }


def user_of(spec: CellSpec) -> User:
    """SandboxError for root, and for a name, which only the image could tell."""
    if spec.user is None:
        return User(uid=NOBODY, gid=NOBODY)
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", spec.user)
    if match is None or int(match[1]) == 0 or int(match[2] or 1) == 0:
        raise SandboxError(f"SandboxSpec.user is {spec.user!r}; give 'uid' or 'uid:gid' as numbers, and not root's")
    return User(uid=int(match[1]), gid=int(match[2] or match[1]))


def workdir_of(spec: CellSpec) -> str:
    """SandboxError for a path that cannot be a file system of its own."""
    if spec.workdir is None:
        return WORKDIR
    path = posixpath.normpath(spec.workdir)
    if not path.startswith("/") or path in NOT_A_WORKDIR or path.startswith(("/proc/", "/sys/", "/dev/", "//")):
        raise SandboxError(f"SandboxSpec.workdir is {spec.workdir!r}; give an absolute path that is no system folder")
    return path


def check(spec: CellSpec, runtimes: frozenset[str]) -> None:
    """SandboxError for what a container is not given."""
    user_of(spec)
    workdir_of(spec)
    if spec.runtime is not None and spec.runtime not in runtimes:
        raise SandboxError(
            f"SandboxSpec.runtime is {spec.runtime!r}, and the engine has {', '.join(sorted(runtimes))}; install it "
            "and name it in the engine's daemon.json"
        )


def refuse_volumes(spec: CellSpec, volumes: Sequence[str]) -> None:
    """SandboxError for volumes that the image declares: each would be a place on the host's disk without bounds.

    Where a disk of ours is mounted instead, there is none.
    """
    left = {posixpath.normpath(place) for place in volumes} - set(disks(spec, user_of(spec)))
    if left:
        raise SandboxError(
            f"the image {spec.image!r} declares volumes, {', '.join(sorted(left))}: nothing bounds what is written "
            "there on this machine's disk; make it anew without VOLUME, or by `docker export` and `docker import`"
        )


def has_tunnel(spec: CellSpec) -> bool:
    """Whether there is a way to the network: never an interface of it, see `agent/tunnel.py`."""
    return spec.network is not None and spec.network.access is not Access.NONE


def tunnel_user(spec: CellSpec) -> User:
    """Neither root nor the programs'."""
    uid = NOBODY - 1 if user_of(spec).uid != NOBODY - 1 else NOBODY - 2
    return User(uid=uid, gid=uid)


def container_config(
    spec: CellSpec, *, image: str, command: Sequence[str], labels: Mapping[str, str], is_agent: bool
) -> dict[str, Any]:
    """Of a container whose first process is `command`: the agent, as root without its powers, or a bystander."""
    user = user_of(spec)
    return {
        "Image": image,
        "Entrypoint": list(command),
        "Cmd": [],
        "User": "0:0" if is_agent else f"{user.uid}:{user.gid}",
        "WorkingDir": workdir_of(spec),
        "Hostname": "sandbox",
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,  # its end is the end of the host
        "Tty": False,
        "HostConfig": {
            **Bounds.of(spec.limits).config(spec),
            "AutoRemove": True,
            "CapAdd": list(AGENT_CAPABILITIES) if is_agent else [],
            "CapDrop": ["ALL"],
            "CgroupnsMode": "private",
            "IpcMode": "none",
            "LogConfig": {"Type": "none"},
            "NetworkMode": "none",
            "OomScoreAdj": 0,
            "ReadonlyRootfs": True,
            "Runtime": spec.runtime or "",
            "SecurityOpt": ["no-new-privileges"],
            "Tmpfs": disks(spec, user),
            "Ulimits": [
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "nofile", "Soft": AGENT_OPEN_FILES, "Hard": AGENT_OPEN_FILES},
            ],
        },
    }


def disks(spec: CellSpec, user: User) -> dict[str, str]:
    """The places that programs may write to, in memory."""
    num_bytes, num_inodes = spec.limits.disk_bytes or DEFAULT_DISK_BYTES, spec.limits.inodes or DEFAULT_INODES
    return {
        place.format(workdir=workdir_of(spec)): (
            f"rw,exec,nosuid,nodev,uid={user.uid},gid={user.gid},mode=0700,"
            f"size={num_bytes * share // 16},nr_inodes={max(2, num_inodes * share // 16)}"
        )
        for place, share in SHARES_OF_DISK
    }


class SharedBounds:
    """The bounds of one container. `change` makes the engine change them."""

    def __init__(self, bounds: Bounds, change: Callable[[Bounds], Awaitable[None]]) -> None:
        self._bounds = bounds
        self._change = change
        self._changing = asyncio.Lock()
        self._slots = asyncio.Semaphore(bounds.pids)
        self._num_held = 0

    @asynccontextmanager
    async def held(self, limits: Limits) -> AsyncGenerator[None, None]:
        """For one program that is run to its end."""
        await self.hold(limits)
        try:
            async with self.slot():
                yield
        finally:
            self.release()

    def slot(self) -> asyncio.Semaphore:
        """To be held by what needs a process."""
        return self._slots

    async def hold(self, limits: Limits) -> None:
        """For one program, until `release`. ValueError when others run within other bounds."""
        async with self._changing:
            bounds = Bounds.of(limits)
            if bounds != self._bounds:
                if self._num_held:
                    raise ValueError(
                        f"a program asks for {bounds} while others run within {self._bounds}, and the programs of a "
                        "container share memory, processes and CPUs; give them in SandboxSpec.limits, or run it alone"
                    )
                await self._change(bounds)
                self._bounds = bounds
                self._slots = asyncio.Semaphore(bounds.pids)
            self._num_held += 1

    def release(self) -> None:
        """It has ended."""
        self._num_held -= 1


OWNER_LABEL = "areal-agent.sandboxes.owner"
HOLDER_LABEL = "areal-agent.sandboxes.holder"
LEASE_LABEL = "areal-agent.sandboxes.lease"
START_LEASE_S = 600.0
"""How long a container may stay unstarted. A longer one has no maker, even if nobody here can tell who that was."""


class Ownership:
    """The labels of one provider's containers."""

    def __init__(self) -> None:
        self._owner = own_tag()
        self._holder = secrets.token_hex(8)

    @property
    def filter(self) -> str:
        """What finds them, and no other provider's."""
        return f"{HOLDER_LABEL}={self._holder}"

    def labels(self) -> dict[str, str]:
        return {
            OWNER_LABEL: self._owner,
            HOLDER_LABEL: self._holder,
            LEASE_LABEL: str(int(time.time() + START_LEASE_S)),
        }


def is_orphan(container: Mapping[str, Any]) -> bool:
    """Whether its maker is known to be dead, or it was never started and its lease is over."""
    labels = container.get("Labels") or {}
    lease = labels.get(LEASE_LABEL, "")
    is_over = container.get("State") == "created" and lease.isdecimal() and int(lease) < time.time()
    return is_over or is_abandoned(labels.get(OWNER_LABEL, ""))
