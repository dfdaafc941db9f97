"""What host and launcher say to each other: frames of fixed size, which carry no text. It knows neither of them."""

import struct
from enum import IntEnum

REQUEST = struct.Struct("=BQ")
"""Request kind, run id."""
REPORT = struct.Struct("=BQiQQ")
"""Report kind, run id, value, CPU microseconds, peak resident bytes."""
MAX_DESCRIPTORS = 8
"""With START: request (JSON), stdin, stdout, stderr, then the control groups to join, as their open `cgroup.procs`."""


MAX_CELL = 1024
"""Bytes of a request to a zygote: what is particular to one jail, as JSON. With it comes the jail's control socket."""


class RequestKind(IntEnum):
    """What the host asks."""

    START = 1
    KILL = 2


class ReportKind(IntEnum):
    """What the launcher answers, and what `value` is."""

    HELLO = 1  # ready; value: the version of Landlock in use, 0 for none; what a jail hands over is in `inside.py`
    STARTED = 2  # value: the program's pid, which is also its session and process group
    ENDED = 3  # value: the wait status; the program's group is dead
    FAILED = 4  # it could not be set up; value: errno, 0 when unknown; run id 0: not the program, the jail
