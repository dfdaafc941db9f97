"""The kernel's limits on each process of a program, and the process count that one of them needs."""

import contextlib
import os
import resource
from typing import Any


def set_limits(request: dict[str, Any], num_processes: int) -> None:
    """Set the kernel's limits on each process of the program. Control groups enforce those that are None.

    The kernel counts processes by user, so the limit is `num_processes`, which exist already, plus `new_processes`.
    """
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_FSIZE, request["file_bytes"])
    lower_limit(resource.RLIMIT_NOFILE, request["open_files"])
    if request["new_processes"] is not None and num_processes:
        lower_limit(resource.RLIMIT_NPROC, num_processes + request["new_processes"])
    # The soft limit ends the program with SIGXCPU; one that ignores it dies a second later.
    if request["cpu_s"] is not None:
        lower_limit(resource.RLIMIT_CPU, request["cpu_s"], grace=1)
    if request["address_space_bytes"] is not None:
        lower_limit(resource.RLIMIT_AS, request["address_space_bytes"])


def lower_limit(name: int, value: int, *, grace: int = 0) -> None:
    """Set a soft limit, and a hard limit `grace` above it; a stricter hard limit of the host's stays."""
    _, ceiling = resource.getrlimit(name)
    hard = value + grace if ceiling == resource.RLIM_INFINITY else min(value + grace, ceiling)
    resource.setrlimit(name, (min(value, hard), hard))


def count_user_tasks() -> int:
    """Return the number of processes and threads of this user, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it may end while we look
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"{entry.path}/task"))
    return count
