"""Landlock: without walls, it lets a program change only its own folder, and signal and trace nobody else."""

import os
import struct

from sandboxes.inner.kernel import IS_LINUX, syscall

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
LANDLOCK_WRITE_FILE, LANDLOCK_REMOVE_AND_MAKE, LANDLOCK_REFER, LANDLOCK_TRUNCATE = 1 << 1, 0x1FF << 4, 1 << 13, 1 << 14
LANDLOCK_SCOPE_ABSTRACT_SOCKETS, LANDLOCK_SCOPE_SIGNALS = 1 << 0, 1 << 1
LANDLOCK_RULE_PATH_BENEATH = 1


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has, 0 for none."""
    if not IS_LINUX:
        return 0
    try:
        return syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
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
