"""How a container is closed: from what is asked of a cell to the configuration that the engine is given.

Nothing of a spec reaches the configuration but what is named here: there is no way to ask for privileges, devices,
capabilities, mounts of the host or its namespaces. It starts nothing.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_agent.errors import SandboxError
from sandboxes.cgroups import DEFAULT_PIDS
from sandboxes.jail import DEFAULT_DISK_BYTES, DEFAULT_INODES
from sandboxes.limits import Limits
from sandboxes.spec import Access, CellSpec

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
