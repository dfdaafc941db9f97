"""Jails: what of the host they show, their system-call filter, and the command of the zygote that forks them.

There are two ways to build the same walls: bubblewrap, or namespaces by system calls (`inner/enter.py`). This module
only describes jails; `bubblewrap.py` starts them.

The filter denies the kernel's rarely used parts and what would undo the jail: mounts and namespaces, tracing, keyrings,
bpf, io_uring, perf, userfaultfd, modules, typing into a terminal, address families other than Unix and IP. Everything
else is allowed: the filter is a second wall behind namespaces and dropped capabilities, not the first.
"""

import errno
import json
import os
import platform
import shutil
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from areal_agent.errors import SandboxError
from sandboxes.execution import base_environment
from sandboxes.proxy import PROXY_PORT, proxy_environment
from sandboxes.spec import Access, CellSpec

INNER = Path(__file__).with_name("inner")
BOOT = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = []; inner = sys.modules['sandboxes.inner'] = types.ModuleType('sandboxes.inner'); "
    "inner.__path__ = [sys.argv.pop(1)]; from sandboxes.inner.{module} import main; main()"
)
"""Runs one module of `inner/` without the package's `__init__`, whose imports are useless there."""
JAIL_UID = 65534
"""The user inside is `nobody`. Outside it is the same user if the host runs as root, else the host's own user."""
INNER_INSIDE = "/sandbox"
SYSTEM_FOLDERS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/alternatives", "/etc/ld.so.cache")  # the targets of program names, and the locations of libraries
NETWORK_FILES = (
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/ca-certificates",
)  # trusted certificates
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
    """The ways to build a jail, in order of preference."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"


@dataclass(frozen=True, kw_only=True, slots=True)
class JailKind:
    """The settings that the jails of one zygote share; `home` is the working directory."""

    walls: Walls
    home: str
    has_proxy: bool

    def command(self, control: int) -> list[str]:
        """Return the command that starts the zygote, which inherits `control`, the descriptor of its control socket."""
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
        """Return bubblewrap's part of the command; SandboxError where it is not installed."""
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
            arguments += ["--perms", "0755", "--dir", parent]  # by default only the owner could enter
        for place, path in shown.items():
            arguments += ["--ro-bind", path, place]
        for device in DEVICES:  # not --dev: it makes a second user namespace, which has no power over the mounts
            arguments += ["--dev-bind", device, device]
        for place, target in links.items():
            arguments += ["--symlink", target, place]
        for place in ("/tmp", self.home, "/dev/shm"):
            arguments += ["--dir", place]
        # The zygote needs these to put walls between its jails; `inside.py` gives all of them up in each jail.
        arguments += ["--remount-ro", "/", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        arguments += ["--cap-add", "CAP_NET_ADMIN"]
        if os.getuid() == 0:  # `inside.py` becomes another user; the filter denies user namespaces
            arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_CHOWN"]
        else:
            # Not --disable-userns, for the same reason as --dev: `inside.py` itself forbids further user namespaces.
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
    """One jail: its walls and the spec of its cell."""

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
        """The settings of this one jail that its zygote is told."""
        limits = self.spec.limits
        return {"disk_bytes": limits.disk_bytes or DEFAULT_DISK_BYTES, "inodes": limits.inodes or DEFAULT_INODES}


def check_workdir(workdir: str | None) -> None:
    """Raise SandboxError for a folder that cannot be a jail's working directory."""
    if workdir is None:
        return
    names = workdir.split("/")[1:]
    is_plain = workdir.startswith("/") and all(name and name not in (".", "..") and "\0" not in name for name in names)
    if not is_plain or names[0] in TAKEN_FOLDERS or Path(sys.base_prefix).is_relative_to(f"/{names[0]}"):
        raise SandboxError(
            f"SandboxSpec.workdir is {workdir!r}; give an absolute path that is not the system's, such as '/app'"
        )


def shown_of_host(*, has_network: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return what a jail shows read-only (host path by place), and its symbolic links (target by place)."""
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


def interpreter() -> str:
    """Return the real interpreter behind any virtual environment, which a jail does not show."""
    return os.path.realpath(sys.executable)


def python_on(module: str, interpreter: str, folder: str = str(INNER)) -> list[str]:
    """Return the command that runs a module of `inner/`, which that process finds at `folder`.

    The Python that it starts sees nothing of this package but `inner/`.
    """
    return [interpreter, "-I", "-S", "-X", "utf8", "-c", BOOT.format(module=module), folder]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The system-call conventions of one machine type."""

    audit: int  # the kernel's id of the calling convention
    numbers: dict[str, int]  # system calls whose numbers differ between machines
    first_foreign: int | None  # numbers from here on belong to another convention of the same machine


ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        first_foreign=0x4000_0000,  # x32
        numbers={
            "socket": 41, "socketpair": 53, "clone": 56, "ioctl": 16, "ptrace": 101, "syslog": 103, "pivot_root": 155,
            "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166,
            "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175,
            "delete_module": 176, "quotactl": 179, "clock_settime": 227, "kexec_load": 246, "add_key": 248,
            "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304,
            "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
            "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
        },
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        first_foreign=None,
        numbers={
            "socket": 198, "socketpair": 199, "clone": 220, "ioctl": 29, "ptrace": 117, "syslog": 116,
            "pivot_root": 41, "adjtimex": 171, "chroot": 51, "acct": 89, "settimeofday": 170, "mount": 40,
            "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142, "init_module": 105, "delete_module": 106,
            "quotactl": 60, "clock_settime": 112, "kexec_load": 104, "add_key": 217, "request_key": 218,
            "keyctl": 219, "unshare": 97, "perf_event_open": 241, "open_by_handle_at": 265, "clock_adjtime": 266,
            "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
            "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
        },
    ),
}  # fmt: skip
COMMON_NUMBERS = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
"""System calls added since 2019 have the same number on every machine."""
CLONE3 = 435
TESTED_BY_ARGUMENT = ("socket", "socketpair", "clone", "ioctl")
CLONE_NEW_ANY = 0x7E02_0080
"""Every flag of clone that makes a namespace. clone3 keeps its flags in memory, which a filter cannot read."""
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
ADDRESS_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink (for addresses); vsock would reach the host
LOAD_WORD, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, JUMP_IF_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data; arguments: 8 bytes, low half first
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
Instruction = tuple[int, int, int, int]
"""Code, distance to jump if true, distance if false, operand."""


def denying_filter(machine: str) -> bytes:
    """Return the filter as an array of struct sock_filter; SandboxError for an unknown machine type."""
    architecture = ARCHITECTURES.get(machine)
    if architecture is None:
        raise SandboxError(
            f"there is no system-call filter for {machine!r}, only for {', '.join(ARCHITECTURES)}; "
            "add its numbers to sandboxes/jail.py"
        )
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _program(architecture))


def _program(architecture: Architecture) -> list[Instruction]:
    numbers = architecture.numbers
    program = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, architecture.audit),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    program += [(LOAD_WORD, 0, 0, NUMBER_AT)]
    if architecture.first_foreign is not None:
        program += _if(JUMP_IF_AT_LEAST, architecture.first_foreign, [_refuse(errno.ENOSYS)])
    program += _if(JUMP_IF_EQUAL, CLONE3, [_refuse(errno.ENOSYS)])  # libc then falls back on clone
    for name, number in {**numbers, **COMMON_NUMBERS}.items():
        if name not in TESTED_BY_ARGUMENT:
            program += _if(JUMP_IF_EQUAL, number, [_refuse(errno.EPERM)])
    program += _if(JUMP_IF_EQUAL, numbers["clone"], _deny_bits(0, CLONE_NEW_ANY))
    program += _if(JUMP_IF_EQUAL, numbers["ioctl"], _deny_values(1, TERMINAL_INPUT))
    for name in ("socket", "socketpair"):
        program += _if(JUMP_IF_EQUAL, numbers[name], _allow_values(0, ADDRESS_FAMILIES))
    return [*program, (RETURN, 0, 0, ALLOW)]


def _if(test: int, operand: int, body: list[Instruction]) -> list[Instruction]:
    """Run `body`, which returns, when the loaded word passes the test."""
    return [(test, 0, len(body), operand), *body]


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


def _load_argument(index: int) -> Instruction:
    return (LOAD_WORD, 0, 0, ARGUMENTS_AT + 8 * index)


def _deny_bits(argument: int, bits: int) -> list[Instruction]:
    return [_load_argument(argument), *_if(JUMP_IF_SET, bits, [_refuse(errno.EPERM)]), (RETURN, 0, 0, ALLOW)]


def _deny_values(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    tests = [step for value in values for step in _if(JUMP_IF_EQUAL, value, [_refuse(errno.EPERM)])]
    return [_load_argument(argument), *tests, (RETURN, 0, 0, ALLOW)]


def _allow_values(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    tests = [step for value in values for step in _if(JUMP_IF_EQUAL, value, [(RETURN, 0, 0, ALLOW)])]
    return [_load_argument(argument), *tests, _refuse(errno.EAFNOSUPPORT)]
