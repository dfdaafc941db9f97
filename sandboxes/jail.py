"""How jails are started: what of the host they show, and the command of the zygote that forks them behind its walls.

Two ways to the same walls: bubblewrap, or namespaces by system calls (`inner/enter.py`). It starts nothing itself.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from areal_agent.errors import SandboxError
from sandboxes.environment import base_environment
from sandboxes.interpreter import INNER, python_on
from sandboxes.proxy import PROXY_PORT, proxy_environment
from sandboxes.seccomp import denying_filter
from sandboxes.spec import Access, CellSpec

JAIL_UID = 65534
"""The user inside, `nobody`. Outside it is the same one when the host runs as root, else the host's own."""
INNER_INSIDE = "/sandbox"
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache")  # names of programs and where libraries are
NETWORK_FILES = (
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/ca-certificates",
)  # whom to trust
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
DEFAULT_WORKDIR = "/work"
TAKEN_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "sys", "tmp", "sandbox")
DEFAULT_DISK_BYTES = 64 * 2**20
DEFAULT_INODES = 10_000


class Walls(StrEnum):
    """What builds a jail, in the order of preference."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"


@dataclass(frozen=True, kw_only=True, slots=True)
class JailKind:
    """What one zygote's jails have in common. `home`: the working directory."""

    walls: Walls
    home: str
    has_proxy: bool

    def command(self, control: int) -> list[str]:
        """Starts the zygote. `control`: the descriptor of its control socket, which it inherits."""
        if self.walls is Walls.BUBBLEWRAP:
            python = python_on("zygote", interpreter(), INNER_INSIDE)
            return [*self._bubblewrap(), *python, str(control), self._config()]
        return [*python_on("enter", interpreter()), str(control), self._config()]

    def _config(self) -> str:
        shown, links = shown_of_host(has_network=self.has_proxy)
        return json.dumps(
            {
                "uid": JAIL_UID,
                "filter": denying_filter(platform.machine()).hex(),
                "shown": shown,
                "devices": DEVICES,
                "links": links,
                "workdir": self.home,
                "env": {**base_environment(self.home), **(proxy_environment() if self.has_proxy else {})},
                "proxy_port": PROXY_PORT if self.has_proxy else None,
            }
        )

    def _bubblewrap(self) -> Sequence[str]:
        """Bubblewrap's part of the command; SandboxError where it is not installed."""
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bubblewrap is not installed; install the package `bubblewrap`")
        shown, links = shown_of_host(has_network=self.has_proxy)
        arguments = [program, "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
        for kind in ("pid", "net", "ipc", "uts", "cgroup"):
            arguments.append(f"--unshare-{kind}")
        arguments += ["--hostname", "sandbox", "--proc", "/proc"]
        for parent in sorted(
            {str(parent) for place in (*shown, *links, self.home) for parent in Path(place).parents} - {"/"}
        ):
            arguments += ["--perms", "0755", "--dir", parent]  # left to itself, it makes them for the owner only
        for place, path in shown.items():
            arguments += ["--ro-bind", path, place]
        for device in DEVICES:  # not --dev: it makes a second namespace of users, without power over the mounts
            arguments += ["--dev-bind", device, device]
        for place, target in links.items():
            arguments += ["--symlink", target, place]
        for place in ("/tmp", self.home, "/dev/shm"):
            arguments += ["--dir", place]
        # What the zygote needs to put walls between its jails; `inside.py` gives all of it up in each.
        arguments += ["--remount-ro", "/", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        arguments += ["--cap-add", "CAP_NET_ADMIN"]
        if os.getuid() == 0:  # `inside.py` becomes another user; the filter denies namespaces of users
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_CHOWN"]
        else:
            # Not --disable-userns, for the same reason as --dev: `inside.py` forbids further ones itself.
            arguments += [
                "--unshare-user",
                "--uid",
                str(JAIL_UID),
                "--gid",
                str(JAIL_UID),
                "--cap-add",
                "CAP_SYS_RESOURCE",
            ]
        return [*arguments, "--"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Jail:
    """One jail: its kind, and what is its own."""

    walls: Walls
    spec: CellSpec

    @property
    def kind(self) -> JailKind:
        network = self.spec.network
        return JailKind(
            walls=self.walls,
            home=self.spec.workdir or DEFAULT_WORKDIR,
            has_proxy=network is not None and network.access is not Access.NONE,
        )

    @property
    def particulars(self) -> dict[str, int]:
        """What the zygote is told of it."""
        limits = self.spec.limits
        return {"disk_bytes": limits.disk_bytes or DEFAULT_DISK_BYTES, "inodes": limits.inodes or DEFAULT_INODES}


def check_workdir(workdir: str | None) -> None:
    """SandboxError for a folder that a jail cannot have as its working directory."""
    if workdir is None:
        return
    names = workdir.split("/")[1:]
    is_plain = workdir.startswith("/") and all(name and name not in (".", "..") and "\0" not in name for name in names)
    if not is_plain or names[0] in TAKEN_FOLDERS or Path(sys.base_prefix).is_relative_to(f"/{names[0]}"):
        raise SandboxError(
            f"SandboxSpec.workdir is {workdir!r}; give an absolute path that is not the system's, such as '/app'"
        )


def interpreter() -> str:
    """The interpreter itself, behind any virtual environment, which a jail does not show."""
    return os.path.realpath(sys.executable)


def shown_of_host(*, has_network: bool) -> tuple[dict[str, str], dict[str, str]]:
    """What a jail shows read-only, path of the host by place; and symbolic links, target by place."""
    shown: dict[str, str] = {"/usr": "/usr"}
    links = dict(DEVICE_LINKS)
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            links[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            shown[folder] = folder
    files = (*SYSTEM_FILES, *NETWORK_FILES) if has_network else SYSTEM_FILES
    shown |= {file: file for file in files if os.path.exists(file)}
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        shown[sys.base_prefix] = sys.base_prefix
    shown[INNER_INSIDE] = str(INNER)
    return shown, links
