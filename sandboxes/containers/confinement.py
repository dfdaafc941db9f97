"""How a container is confined: its configuration, and the labels of its owner.

`container_config` translates a spec. Only what is named here reaches the engine: there is no way to ask for privileges,
devices, capabilities, mounts of the host or its namespaces.

`Ownership` is labels that outlive the maker of a container, and tell that it is dead.
"""

import contextlib
import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_agent.errors import SandboxError
from sandboxes.agent.walls import NETWORK_SETTINGS
from sandboxes.cell import User, fresh_user
from sandboxes.cgroups import AGENT_BYTES, CPU_PERIOD_US, TCP_LIMIT, Bounds, buffer_bytes, disk_of
from sandboxes.owner import own_tag
from sandboxes.spec import CellSpec, Limits

WORKDIR = "/work"
DEFAULT_RUNTIME = "runc"
AGENT_PIDS = 4
"""Relay and forker, and those of two tunnels."""
SANDBOXED_BYTES, SANDBOXED_PIDS = 128 * 2**20, 256
"""Added for a runtime with a kernel of its own, such as gVisor's, which lives within the container's bounds."""
AGENT_CAPABILITIES = ("SETUID", "SETGID", "KILL")  # to become the programs' user, and to kill its processes
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER")  # of programs that run as root, to change any file of theirs
AGENT_OPEN_FILES = 4096
SHARES_OF_DISK = (("{workdir}", 12), ("/tmp", 3), ("/dev/shm", 1))
"""Shares, in sixteenths, of `Limits.disk_bytes` and `inodes` that each of these file systems gets."""
KERNEL_FOLDERS = ("/proc", "/sys", "/dev")
NOT_A_WORKDIR = (*KERNEL_FOLDERS, "/", "/tmp", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")


def config_of(bounds: Bounds, spec: CellSpec) -> dict[str, Any]:
    """Return the engine's settings, without swap, and with room for our own processes and the runtime.

    What is on the disks counts as memory of the container and stays after its writer. So there is room for full disks:
    whenever memory runs out, some program holds more than its bound, and is killed, never the agent.
    """
    is_kernel = spec.runtime not in (None, DEFAULT_RUNTIME)
    memory_bytes = bounds.memory_bytes + disk_of(spec.limits)[0]
    memory_bytes += AGENT_BYTES + SANDBOXED_BYTES * is_kernel
    return {
        "Memory": memory_bytes,
        "MemorySwap": memory_bytes,
        "PidsLimit": bounds.pids + AGENT_PIDS + SANDBOXED_PIDS * is_kernel,
        "CpuPeriod": CPU_PERIOD_US,
        "CpuQuota": bounds.quota_us,  # `NanoCpus` cannot be undone, nor be more than the machine has
    }


def user_of(spec: CellSpec) -> User:
    """Return the programs' user, by default a fresh one; SandboxError for a name of the image's, and mostly for root.

    Root is only for images that can be written to: elsewhere it could do nothing that others cannot.
    """
    if spec.user is None:
        return fresh_user()
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", spec.user)
    user = User(uid=int(match[1]), gid=int(match[2] or match[1])) if match else None
    if user is None or (0 in user and not (spec.is_writable and user == (0, 0))):
        raise SandboxError(
            f"SandboxSpec.user is {spec.user!r}; give 'uid' or 'uid:gid' as numbers, and root's ('0') only together "
            "with is_writable=True"
        )
    return user


def workdir_of(spec: CellSpec) -> str:
    """Return the working directory; SandboxError for a path that cannot be a file system of its own, if it is to be."""
    if spec.workdir is None:
        return WORKDIR
    path = posixpath.normpath(spec.workdir)
    taken = KERNEL_FOLDERS if spec.is_writable else NOT_A_WORKDIR
    if not path.startswith("/") or path in taken or path.startswith(("/proc/", "/sys/", "/dev/", "//")):
        raise SandboxError(f"SandboxSpec.workdir is {spec.workdir!r}; give an absolute path outside the system folders")
    return path


def check(spec: CellSpec, runtimes: frozenset[str]) -> None:
    """Raise SandboxError for what a container cannot have."""
    user_of(spec)
    workdir_of(spec)
    if spec.runtime is not None and spec.runtime not in runtimes:
        raise SandboxError(
            f"SandboxSpec.runtime is {spec.runtime!r}, and the engine has {', '.join(sorted(runtimes))}; install it "
            "and name it in the engine's daemon.json"
        )


def refuse_volumes(spec: CellSpec, volumes: Sequence[str]) -> None:
    """Raise SandboxError if the image declares volumes, each of which would be an unbounded place on the host's disk.

    A volume at the place of one of our disks does not matter: the disk is mounted instead.
    """
    left = {posixpath.normpath(place) for place in volumes} - set(disks(spec, fresh_user()))
    if left:
        raise SandboxError(
            f"the image {spec.image!r} declares volumes, {', '.join(sorted(left))}: nothing bounds what is written "
            "there on this machine's disk; rebuild it without VOLUME, or by `docker export` and `docker import`"
        )


def container_config(
    spec: CellSpec, user: User, *, image: str, command: Sequence[str], labels: Mapping[str, str]
) -> dict[str, Any]:
    """Configure a container whose first process is `command`: the agent, as root without its powers."""
    capabilities = AGENT_CAPABILITIES + ROOT_CAPABILITIES * (user.uid == 0)
    return {
        "Image": image,
        "Entrypoint": list(command),
        "Cmd": [],
        "User": "0:0",
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
            **config_of(Bounds.of(spec.limits), spec),
            "CapAdd": list(capabilities),
            "CapDrop": ["ALL"],
            "CgroupnsMode": "private",
            "IpcMode": "none",
            "LogConfig": {"Type": "none"},
            "NetworkMode": "none",
            "OomScoreAdj": 0,
            "ReadonlyRootfs": not spec.is_writable,
            "Runtime": spec.runtime or "",
            "SecurityOpt": ["no-new-privileges"],
            "Sysctls": NETWORK_SETTINGS,
            "Tmpfs": disks(spec, user),
            "Ulimits": [
                {"Name": "core", "Soft": 1, "Hard": 1},
                {"Name": "nofile", "Soft": AGENT_OPEN_FILES, "Hard": AGENT_OPEN_FILES},
            ],
        },
    }


def disks(spec: CellSpec, user: User) -> dict[str, str]:
    """Return the places in memory that programs may write to: all that they may, unless the image can be written to."""
    num_bytes, num_inodes = disk_of(spec.limits)
    return {
        place.format(workdir=workdir_of(spec)): (
            f"rw,exec,nosuid,nodev,uid={user.uid},gid={user.gid},mode=0700,"
            f"size={num_bytes * share // 16},nr_inodes={max(2, num_inodes * share // 16)}"
        )
        for place, share in (SHARES_OF_DISK[-1:] if spec.is_writable else SHARES_OF_DISK)
    }


def bound_buffers(container: str, limits: Limits) -> None:
    """Bound the buffers of sockets where control groups have version 1, which needs root; in version 2 they are memory.

    The engine has an option for it, KernelMemoryTCP, which its runtime ignores (runc from 1.0 on).
    """
    for group in (f"docker/{container}", f"system.slice/docker-{container}.scope"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            Path("/sys/fs/cgroup/memory", group, TCP_LIMIT).write_text(str(buffer_bytes(limits.memory_bytes)))


OWNER_LABEL = "areal-agent.sandboxes.owner"
HOLDER_LABEL = "areal-agent.sandboxes.holder"


class Ownership:
    """The labels of one provider's containers. `filter` is one that no other provider's containers have."""

    def __init__(self) -> None:
        holder = secrets.token_hex(8)
        self.labels = {OWNER_LABEL: own_tag(), HOLDER_LABEL: holder}
        self.filter = f"{HOLDER_LABEL}={holder}"
