"""Tags that name the owner of a thing in the system (a folder, a control group) and tell whether it is dead.

A tag holds the owner's process id, start time and PID namespace, so a reused process id is not taken for the owner.
"""

import os
from pathlib import Path

PREFIX = "areal-agent-sandboxes-"


def own_tag() -> str:
    """Return the tag of this process."""
    return f"{os.getpid()}.{_start_of(os.getpid())}.{_namespace()}"


def is_abandoned(tag: str) -> bool:
    """Return whether the owner is known to be dead. False for a malformed tag or one from another PID namespace."""
    try:
        pid, start, namespace = (int(part) for part in tag.split("."))
    except ValueError:
        return False
    return namespace == _namespace() and namespace != 0 and _start_of(pid) != start


def _start_of(pid: int) -> int:
    """Return a process's start in clock ticks since boot; 0 when there is no such process or no /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[19])  # the name in parentheses may hold anything


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
