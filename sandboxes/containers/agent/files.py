"""Files of a working directory that is not trusted: no link is followed, and only regular files are read.

This blocks, so it runs in a process of its own, with the programs' rights. Data travels as packed by `wire.py`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from sandboxes.containers.agent.wire import pack, unpack

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO would wait for a writer
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
CHUNK_BYTES = 1 << 20
MAX_DEPTH = 60
"""The deepest nesting of folders that is listed; each level holds a descriptor."""
FOLDER, FILE, EXECUTABLE = b"d", b"f", b"x"


def read_file(path: bytes, max_bytes: int, out: int) -> None:
    folder, name = _descend(path, create=False)
    write_all(out, _read_regular(name, folder, max_bytes))


def write_files(path: bytes, source: int) -> None:
    """Write files and folders from packed triples: kind, path below `path`, data."""
    entries = unpack(read_all(source))
    for kind, name, data in zip(entries[::3], entries[1::3], entries[2::3], strict=True):
        place = b"/".join(part for part in (path, name) if part)
        if kind == FOLDER:
            os.close(_descend(place + b"/.", create=True)[0])
        else:
            _write_regular(place, data, 0o700 if kind == EXECUTABLE else 0o600)


def list_tree(path: bytes, max_bytes: int, out: int) -> None:
    """List a folder as such triples; EFBIG when they exceed `max_bytes`."""
    top, _ = _descend(path + b"/.", create=False)
    room = max_bytes
    for entry in _entries(top, b"", 0):
        room -= len(entry)
        if room < 0:
            raise OSError(errno.EFBIG, "more than asked for")
        write_all(out, entry)


def read_all(source: int) -> bytes:
    chunks: list[bytes] = []
    while chunk := os.read(source, CHUNK_BYTES):
        chunks.append(chunk)
    return b"".join(chunks)


def write_all(out: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(out, view) :]


def _entries(folder: int, prefix: bytes, depth: int) -> Iterator[bytes]:
    """Yield the entries of a hostile folder, leaving out what is neither file nor folder."""
    if depth > MAX_DEPTH:
        raise OSError(errno.ELOOP, "folders too deep")
    for name in sorted(os.listdir(folder)):
        name, path = os.fsencode(name), prefix + os.fsencode(name)
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            yield pack(FOLDER, path, b"")
            child = os.open(name, FOLDER_FLAGS, dir_fd=folder)
            yield from _entries(child, path + b"/", depth + 1)
            os.close(child)
        elif stat.S_ISREG(mode):
            yield pack(EXECUTABLE if mode & 0o100 else FILE, path, _read_regular(name, folder, 1 << 40))


def _read_regular(name: bytes, folder: int, max_bytes: int) -> bytes:
    file = os.open(name, FILE_FLAGS, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "only regular files are read")
    chunks: list[bytes] = []
    while chunk := os.read(file, CHUNK_BYTES):
        chunks.append(chunk)
        max_bytes -= len(chunk)
        if max_bytes < 0:
            raise OSError(errno.EFBIG, "longer than allowed")
    os.close(file)
    return b"".join(chunks)


def _write_regular(path: bytes, data: bytes, mode: int) -> None:
    folder, name = _descend(path, create=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)  # a program may have put a FIFO or a link there
    file = os.open(name, NEW_FILE_FLAGS, mode, dir_fd=folder)
    write_all(file, data)
    os.close(file)
    os.close(folder)


def _descend(path: bytes, *, create: bool) -> tuple[int, bytes]:
    """Return the open folder that holds the last name of `path`, and this name; never follow a link."""
    *parents, name = path.split(b"/")
    folder = os.open(b".", FOLDER_FLAGS)
    for parent in parents:
        if parent in (b"", b"."):
            continue
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent, 0o700, dir_fd=folder)
        below = os.open(parent, FOLDER_FLAGS, dir_fd=folder)
        os.close(folder)
        folder = below
    return folder, name
