"""The system-call filter of jails and containers.

It denies the kernel's rarely used parts and what would undo the walls: mounts and namespaces, tracing, keyrings, bpf,
io_uring, perf, userfaultfd, modules, typing into a terminal, address families other than Unix and IP. Everything else
is allowed: the filter is a second wall behind namespaces and dropped capabilities, not the first.
"""

import errno
import struct
from dataclasses import dataclass

from areal_agent.errors import SandboxError


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
            "add its numbers to sandboxes/seccomp.py"
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
