"""How a launcher is started behind walls: what of the host a jail shows, and the commands that build it.

Two ways to the same walls: bubblewrap, or namespaces by system calls (`enter.py`). It starts nothing itself.
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
from sandboxes.limits import Limits
from sandboxes.seccomp import denying_filter

JAIL_UID = 65534
"""The user inside, `nobody`. Outside it is the same one when the host runs as root, else the host's own."""
PACKAGE = Path(__file__).parent
PACKAGE_INSIDE = "/sandbox"
BOOT = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = [sys.argv.pop(1)]; from sandboxes.{module} import main; main()"
)
"""Runs one module of this package without its `__init__`, which imports what is of no use inside."""
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache")  # names of programs and where libraries are
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
DEFAULT_DISK_BYTES = 64 * 2**20
DEFAULT_INODES = 10_000


class Walls(StrEnum):
    """What builds a jail, in the order of preference."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"


@dataclass(frozen=True, kw_only=True, slots=True)
class Jail:
    """The command that starts a launcher in a jail of its own."""

    walls: Walls
    limits: Limits

    def command(self, control: int) -> list[str]:
        """`control`: the descriptor of the control socket, which the launcher inherits."""
        if self.walls is Walls.BUBBLEWRAP:
            return [*bubblewrap(), *python_on("inside", PACKAGE_INSIDE), str(control), self._config()]
        return [*python_on("enter", str(PACKAGE)), str(control), self._config()]

    def _config(self) -> str:
        shown, links = shown_of_host()
        return json.dumps(
            {
                "uid": JAIL_UID,
                "disk_bytes": self.limits.disk_bytes or DEFAULT_DISK_BYTES,
                "inodes": self.limits.inodes or DEFAULT_INODES,
                "filter": denying_filter(platform.machine()).hex(),
                "shown": shown,
                "devices": DEVICES,
                "links": links,
            }
        )


def python_on(module: str, package: str) -> list[str]:
    return [interpreter(), "-I", "-S", "-X", "utf8", "-c", BOOT.format(module=module), package]


def interpreter() -> str:
    """The interpreter itself, behind any virtual environment, which a jail does not show."""
    return os.path.realpath(sys.executable)


def shown_of_host() -> tuple[dict[str, str], dict[str, str]]:
    """What a jail shows read-only, path of the host by place; and symbolic links, target by place."""
    shown: dict[str, str] = {"/usr": "/usr"}
    links = dict(DEVICE_LINKS)
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            links[folder] = os.readlink(folder)
        elif os.path.isdir(folder):
            shown[folder] = folder
    shown |= {file: file for file in SYSTEM_FILES if os.path.exists(file)}
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        shown[sys.base_prefix] = sys.base_prefix
    shown[PACKAGE_INSIDE] = str(PACKAGE)
    return shown, links


def bubblewrap() -> Sequence[str]:
    """Bubblewrap's part of the command; SandboxError where it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("bubblewrap is not installed; install the package `bubblewrap`")
    shown, links = shown_of_host()
    arguments = [program, "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
    for kind in ("pid", "net", "ipc", "uts", "cgroup"):
        arguments.append(f"--unshare-{kind}")
    arguments += ["--hostname", "sandbox", "--proc", "/proc"]
    for parent in sorted({str(parent) for place in (*shown, *links) for parent in Path(place).parents} - {"/"}):
        arguments += ["--perms", "0755", "--dir", parent]  # left to itself, it makes them for the owner only
    for place, path in shown.items():
        arguments += ["--ro-bind", path, place]
    for device in DEVICES:  # not --dev: it makes a second namespace of users, without power over the mounts
        arguments += ["--dev-bind", device, device]
    for place, target in links.items():
        arguments += ["--symlink", target, place]
    for place in ("/tmp", "/work", "/dev/shm"):
        arguments += ["--dir", place]
    arguments += ["--remount-ro", "/", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    if os.getuid() == 0:  # `inside.py` becomes another user; the filter denies namespaces of users
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_CHOWN"]
    else:
        # Not --disable-userns, for the same reason as --dev: `inside.py` forbids further ones itself.
        arguments += ["--unshare-user", "--uid", str(JAIL_UID), "--gid", str(JAIL_UID), "--cap-add", "CAP_SYS_RESOURCE"]
    return [*arguments, "--"]
