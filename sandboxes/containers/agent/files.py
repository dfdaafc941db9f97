"""Files of a container's working directory, as a process with the programs' rights reads and writes them.

Data travels as packed by `wire.py`: a file or folder is a triple of kind, path and data.
"""

import errno
import os

from sandboxes.containers.agent.wire import pack, unpack
from sandboxes.inner.files import (
    CHUNK_BYTES,
    FOLDER_FLAGS,
    entries_below,
    open_folder,
    read_file,
    write_all,
    write_file,
)

MAX_DEPTH = 60
"""The deepest nesting of folders that is listed; each level holds a descriptor."""
FOLDER, FILE, EXECUTABLE = b"d", b"f", b"x"


def send_file(path: bytes, max_bytes: int, out: int) -> None:
    *parents, name = _names(path)
    with open_folder(_here(), parents) as folder:
        data = read_file(folder, name, max_bytes)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, "longer than allowed")
    write_all(out, data)


def receive_files(path: bytes, source: int) -> None:
    """Write files and folders from packed triples, whose paths are below `path`."""
    chunks: list[bytes] = []
    while chunk := os.read(source, CHUNK_BYTES):
        chunks.append(chunk)
    triples = unpack(b"".join(chunks))
    top, above = _here(), _names(path)
    for kind, place, data in zip(triples[::3], triples[1::3], triples[2::3], strict=True):
        names = above + _names(place)
        with open_folder(top, names if kind == FOLDER else names[:-1], create=True) as folder:
            if kind != FOLDER:
                write_file(folder, names[-1], data, 0o700 if kind == EXECUTABLE else 0o600)


def send_tree(path: bytes, max_bytes: int, out: int) -> None:
    """Send what is below a folder as such triples; EFBIG when they exceed `max_bytes`."""
    room = max_bytes
    with open_folder(_here(), _names(path)) as folder:
        for place, data, is_executable in entries_below(folder, max_bytes, MAX_DEPTH):
            kind = FOLDER if data is None else EXECUTABLE if is_executable else FILE
            entry = pack(kind, os.fsencode(place), data or b"")
            room -= len(entry)
            if room < 0:
                raise OSError(errno.EFBIG, "more than asked for")
            write_all(out, entry)


def _here() -> int:
    return os.open(".", FOLDER_FLAGS)


def _names(path: bytes) -> list[str]:
    return [os.fsdecode(name) for name in path.split(b"/") if name not in (b"", b".")]
