"""Whose a thing in the system is: a tag in its name that outlives its maker, and what to do when the maker is dead.

A process is named by its id, its start and its namespace of ids: an id that was given anew is not the dead owner.
"""

import os
from pathlib import Path

FOLDER_PREFIX = "areal-agent-sandboxes-"
GROUP_PREFIX = "areal-agent-sandboxes-"


def own_tag() -> str:
    """The tag of this process."""
    return f"{os.getpid()}.{_start_of(os.getpid())}.{_namespace()}"


def is_abandoned(tag: str) -> bool:
    """Whether the owner is known to be dead. What another namespace of ids made, or bears no tag, is left alone."""
    try:
        pid, start, namespace = (int(part) for part in tag.split("."))
    except ValueError:
        return False
    return namespace == _namespace() and namespace != 0 and _start_of(pid) != start


def _start_of(pid: int) -> int:
    """Clock ticks from boot to the start of a process; 0 when there is none, or no /proc."""
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
