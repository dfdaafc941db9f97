"""What host and agent say to each other over the one stream of a container, and how it is packed. Both ends import it.

The host reads nothing but numbers and raw bytes: nothing that comes out of a container is decoded to anything else.
"""

import struct
from enum import IntEnum

HEADER = struct.Struct("=BQI")
"""Kind, number of the run (0: the container), bytes that follow."""
MAX_PAYLOAD_BYTES = 1 << 20
"""The host takes a larger one for what it is: no frame of the agent's."""
START = struct.Struct("=dq?i")
"""Of START: seconds from its start to the deadline (0: none), bytes of output (-1: any number), whether output waits to
be read, and how many bytes of stdin follow here, which then is a file (-1: it is a pipe, and comes by STDIN)."""
REQUEST = struct.Struct("=BIIIqQQ")
"""What to do, user, group, CPU seconds (0: any number), address space (-1: any), file length, open files."""
ENDED = struct.Struct("=iQQQIIB?")
"""Wait status, microseconds from start to end, CPU microseconds, peak resident bytes, processes killed for want of
memory, refused forks, `End`, and whether it printed more than it may."""


class Ask(IntEnum):
    """What the host asks."""

    START = 1  # then START, stdin, and what `program.py` reads
    STDIN = 2
    CLOSE_STDIN = 3
    KILL = 4
    MORE = 5  # of a run whose output waits: its reader has taken a chunk


class Tell(IntEnum):
    """What the agent tells."""

    READY = 1  # run 0: an `int` of `Has`
    STDOUT = 2
    STDERR = 3
    TAKEN = 4  # stdin so far has been written, or nobody will read it (one byte: 1)
    CLOSED = 5  # one byte, the number of a stream that the program has closed; of output that waits to be read
    ENDED = 6
    FAILED = 7  # it could not be set up; an errno
    STARTED = 8  # its time begins


class Operation(IntEnum):
    """What a forked process does. Files are read and written as the program's user, in a process of their own."""

    EXECUTABLE = 1
    SOURCE = 2
    READ = 3
    WRITE = 4
    LIST = 5


class End(IntEnum):
    """Why the agent ended a program."""

    ITSELF = 0
    DEADLINE = 1
    OUTPUT = 2


class Has(IntEnum):
    """What of the image's Python makes a difference; bits."""

    FILTER = 1
    WARM_PYTHON = 2


def pack(*texts: bytes) -> bytes:
    """Any number of byte strings as one.

    >>> unpack(pack(b"a", b"", b"c"))
    [b'a', b'', b'c']
    """
    return b"".join(len(text).to_bytes(4, "big") + text for text in texts)


def unpack(data: bytes) -> list[bytes]:
    """What `pack` packed; ValueError for anything else."""
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if at + 4 > len(data) or end > len(data):
            raise ValueError(f"{len(data)} bytes are cut short")
        texts.append(data[at + 4 : end])
        at = end
    return texts
