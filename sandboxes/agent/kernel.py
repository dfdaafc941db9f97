"""System calls that Python has no function for: dropping privileges, filters of system calls, Landlock."""

import contextlib
import ctypes
import os
import struct
import sys
from typing import Any

IS_LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True)
if IS_LINUX:
    LIBC.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_KEEPCAPS = 22, 2, 8
CAPABILITY_VERSION_3 = 0x20080522
KILL, SETGID, SETUID = 1 << 5, 1 << 6, 1 << 7
"""The capabilities that an agent keeps, to become its programs' user and to kill its processes."""
OF_ROOT = 1 << 0 | 1 << 1 | 1 << 3
"""Those of programs that run as root, to change any file of theirs: CHOWN, DAC_OVERRIDE and FOWNER."""
OF_AGENT_OF_ROOT = KILL | SETGID | SETUID | OF_ROOT
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
LANDLOCK_WRITE_FILE, LANDLOCK_REMOVE_AND_MAKE, LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 1, 0x1FF << 4, 1 << 13, 1 << 14
LANDLOCK_SCOPE_ABSTRACT_SOCKETS, LANDLOCK_SCOPE_SIGNALS = 1 << 0, 1 << 1
LANDLOCK_RULE_PATH_BENEATH = 1


def check(result: int) -> int:
    """Return the result of a libc call, or raise OSError with its errno."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int) -> None:
    check(LIBC.prctl(option, value, 0, 0, 0))


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call that libc has no function for; integers are passed as C longs."""
    longs = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in (number, *arguments)]
    return check(LIBC.syscall(*longs))


def drop_privileges(kept: int = 0) -> None:
    """Drop every capability but `kept`, even as root, and gain none from setuid programs."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    set_capabilities(kept, kept)


def set_capabilities(effective: int, permitted: int) -> None:
    """Set the capabilities that are in force and those that may be: no more than before."""
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, struct.pack("=6I", effective, permitted, 0, 0, 0, 0)))


def change_user(uid: int, kept: int) -> None:
    """Become another user, for good and with the capabilities `kept`."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresuid(uid, uid, uid)
    set_capabilities(kept, kept)


def load_filter(program: bytes) -> None:
    """Load a filter for this process and its descendants; it must have given up gaining privileges."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions)))
    check(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header), 0, 0))


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 for none."""
    with contextlib.suppress(OSError):
        return syscall(LANDLOCK_CREATE_RULESET, None, 0, 1) if IS_LINUX else 0
    return 0


def restrict_to_folder(version: int) -> None:
    """Allow changes only beneath the current folder, and no signalling or tracing of outside processes.

    Signals need version 6 (Linux 6.12). Landlock always denies tracing, and with it reading the environment and memory
    of other processes.
    """
    writes = LANDLOCK_WRITE_FILE | LANDLOCK_REMOVE_AND_MAKE
    writes |= (LANDLOCK_REFER if version >= 2 else 0) | (LANDLOCK_TRUNCATE if version >= 3 else 0)
    scopes = LANDLOCK_SCOPE_ABSTRACT_SOCKETS | LANDLOCK_SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("=QQQ", writes, 0, scopes)
    size = 24 if version >= 6 else 8
    ruleset = syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0)
    for path, allowed in ((".", writes), (os.devnull, writes & (LANDLOCK_WRITE_FILE | LANDLOCK_TRUNCATE))):
        beneath = os.open(path, os.O_PATH)
        syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
    syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
