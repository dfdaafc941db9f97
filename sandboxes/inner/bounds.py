"""The kernel's limits on each process of a program, and the count that one of them needs."""

import contextlib
import os
import resource
from typing import Any


def set_limits(request: dict[str, Any], num_processes: int) -> None:
    """The kernel's limits on each process of the program. Those of `None` are kept by control groups instead.

    The kernel counts processes by user: `new_processes` beside the `num_processes` that there are bound all together.
    """
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_FSIZE, request["file_bytes"])
    lower_limit(resource.RLIMIT_NOFILE, request["open_files"])
    if request["new_processes"] is not None and num_processes:
        lower_limit(resource.RLIMIT_NPROC, num_processes + request["new_processes"])
    # At the soft limit SIGXCPU ends the program; one that ignores it dies a second later.
    if request["cpu_s"] is not None:
        lower_limit(resource.RLIMIT_CPU, request["cpu_s"], grace=1)
    if request["address_space_bytes"] is not None:
        lower_limit(resource.RLIMIT_AS, request["address_space_bytes"])


def lower_limit(name: int, value: int, *, grace: int = 0) -> None:
    """Set a limit and its ceiling, `grace` above it; a stricter ceiling of the host's own stays."""
    _, ceiling = resource.getrlimit(name)
    hard = value + grace if ceiling == resource.RLIM_INFINITY else min(value + grace, ceiling)
    resource.setrlimit(name, (min(value, hard), hard))


def count_user_tasks() -> int:
    """Processes and threads of this user, as RLIMIT_NPROC counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it may end while we look
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"{entry.path}/task"))
    return count
