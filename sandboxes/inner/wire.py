"""The frames between host and launcher, which are of fixed size and carry no text."""

import struct
from enum import IntEnum

REQUEST = struct.Struct("=BQ")
"""Request kind, run id."""
REPORT = struct.Struct("=BQiQQ")
"""Report kind, run id, value, CPU microseconds, peak resident bytes."""
MAX_DESCRIPTORS = 8
"""With START: request (JSON), stdin, stdout, stderr, then an open `cgroup.procs` for each control group to join."""


MAX_CELL = 1024
"""The most bytes of a request to a zygote: one jail's settings, as JSON. The jail's control socket comes with it."""


class RequestKind(IntEnum):
    """The requests of the host."""

    START = 1
    KILL = 2


class ReportKind(IntEnum):
    """The reports of the launcher, and the meaning of `value` in each."""

    HELLO = 1  # ready; value: the version of Landlock in use, 0 for none; a jail sends descriptors, see `walls.py`
    STARTED = 2  # value: the program's pid, which is also its session and process group
    ENDED = 3  # value: the wait status; the program's group is dead
    FAILED = 4  # it could not be set up; value: errno, 0 when unknown; run id 0: the jail itself failed
