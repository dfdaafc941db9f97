"""The frames between host and agent over their one stream, and those between the agent's processes.

The host decodes nothing that comes out of a sandbox except numbers and raw bytes.
"""

import struct
import sys
from collections.abc import Iterator
from enum import IntEnum

HEADER = struct.Struct("=BQI")
"""Kind, number of the run (0: the whole sandbox), length of the body that follows."""
MAX_PAYLOAD_BYTES = 1 << 20
"""A frame with a longer body is not the agent's, and the host refuses it."""
START = struct.Struct("=dq?i")
"""The body of START: seconds from the program's start to its deadline (0: none), bytes of output (-1: unbounded),
whether output waits until the reader took the last chunk, and the length of stdin, which follows and becomes a file
(-1: stdin is a pipe, and comes by STDIN)."""
REQUEST = struct.Struct("=BIIIQIQI")
"""The start of a request to run a program: operation, user, group, CPU seconds, file length, open files and, where no
control group counts them, bytes of address space and processes of this user; 0 is unbounded. Packed texts follow: the
working directory, the folder in it to run in, the packed environment, and what the operation needs."""
ENDED = struct.Struct("=iQQQIIB?")
"""Wait status, microseconds from start to end, CPU microseconds, peak resident bytes, processes that ran out of memory,
refused forks, `End`, and whether the program printed more than it may."""


class Ask(IntEnum):
    """The kinds of frames that the host sends."""

    START = 1  # the body: START, stdin, and the request that `program.py` reads
    STDIN = 2
    CLOSE_STDIN = 3
    KILL = 4
    MORE = 5  # for a paced run: its reader has taken a chunk
    PING = 6  # run 0


class Tell(IntEnum):
    """The kinds of frames that the agent sends."""

    READY = 1  # run 0: one byte, the version of Landlock in use
    STDOUT = 2
    STDERR = 3
    TAKEN = 4  # stdin so far has been written; a byte of 1 if nobody will read it
    CLOSED = 5  # for a paced run: one byte, the number of the stream that the program has closed
    ENDED = 6
    FAILED = 7  # the program could not be set up; an errno
    STARTED = 8  # the program's time begins
    PONG = 9  # run 0: the answer to PING


class Operation(IntEnum):
    """The task of a forked process. Files are handled as the programs' user, in a process of their own."""

    EXECUTABLE = 1
    SOURCE = 2
    READ = 3
    WRITE = 4
    LIST = 5


FOLDER, FILE, EXECUTABLE = b"d", b"f", b"x"
"""The kinds of a packed file or folder."""


class End(IntEnum):
    """The reason why a program ended."""

    ITSELF = 0
    DEADLINE = 1
    OUTPUT = 2
    DISK = 3  # the host says so, of all programs of a sandbox that wrote too much


ORDER = struct.Struct("=BQI")
"""From relay to forker: `Order`, number of the run, user; with START, descriptors: request, stdin, stdout, stderr."""
NUM_DESCRIPTORS = 4
REPORT = struct.Struct("=BQiQQ")
"""From forker to relay: `Report`, number of the run, a value, CPU microseconds, peak resident bytes."""


class Order(IntEnum):
    """The requests of the relay to the forker."""

    START = 1
    KILL = 2


class Report(IntEnum):
    """The reports of the forker, or of a child of it that could not be set up, to the relay."""

    ENDED = 1  # value: the wait status; everything that came of the program is dead
    FAILED = 2  # value: an errno
    STARTED = 3  # value: the process id, as the forker sees it


def whole_frames(received: bytearray, max_bytes: float = float("inf")) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, number and body of the frames at the front, and remove them; ValueError for too long a body."""
    while len(received) >= HEADER.size:
        kind, number, size = HEADER.unpack_from(received)
        if size > max_bytes:
            raise ValueError(f"a frame of {size} bytes")
        end = HEADER.size + size
        if len(received) < end:
            return
        body = bytes(received[HEADER.size : end])
        del received[:end]
        yield kind, number, body


def pack(*texts: bytes) -> bytes:
    """Pack any number of byte strings into one.

    >>> unpack(pack(b"a", b"", b"c"))
    [b'a', b'', b'c']
    """
    return b"".join(len(text).to_bytes(4, "big") + text for text in texts)


def unpack(data: bytes, max_texts: int = sys.maxsize) -> list[bytes]:
    """Return the byte strings that `pack` packed; ValueError for anything else, or more of them."""
    texts: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data) or len(texts) == max_texts:
            raise ValueError(f"{len(data)} bytes are cut short, or hold more than {max_texts} texts")
        texts.append(data[at + 4 : end])
        at = end
    return texts
