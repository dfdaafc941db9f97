"""System calls that Python has no function for, and the dropping of privileges."""

import ctypes
import os
import struct
import sys
from typing import Any

IS_LINUX = sys.platform == "linux"
LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL = LIBC["prctl"]
_PRCTL.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_KEEPCAPS = 8
CAPABILITY_VERSION_3 = 0x20080522


def check(result: int) -> int:
    """Return the result of a libc call, or raise OSError with its errno."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, value: int) -> None:
    check(_PRCTL(option, value, 0, 0, 0))


def syscall(number: int, *arguments: Any) -> int:
    """Make a system call that libc has no function for; integers are passed as C longs."""
    longs = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in (number, *arguments)]
    return check(LIBC.syscall(*longs))


def drop_privileges() -> None:
    """Drop every capability, even as root, and gain none from setuid programs."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    set_capabilities(0, 0)


def set_capabilities(effective: int, permitted: int) -> None:
    """Set the capabilities, of numbers below 32, that are in force and that may be: no more than before."""
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, struct.pack("=6I", effective, permitted, 0, 0, 0, 0)))


def change_user(uid: int, capabilities: int) -> None:
    """Change all of the user's ids and keep these capabilities."""
    prctl(PR_SET_KEEPCAPS, 1)
    os.setresuid(uid, uid, uid)
    set_capabilities(capabilities, capabilities)


def load_filter(program: bytes) -> None:
    """Load a filter for this process and its descendants; it must have given up gaining privileges."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    check(LIBC.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header, 0, 0))
