"""Files beneath an open folder that is not trusted: no link is followed, and only regular files are read.

The host uses it for working folders that it can open itself, the agent for those of containers. All of it blocks.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Generator, Iterator, Sequence

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO would wait for a writer
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
CHUNK_BYTES = 1 << 20


@contextlib.contextmanager
def open_folder(
    top: int, names: Sequence[str], *, create: bool = False, owner: int | None = None
) -> Generator[int, None, None]:
    """Open the folder at the end of these names; with `create`, make those that are missing, for `owner`."""
    folder = os.dup(top)
    try:
        for name in names:
            if create:
                _make_folder(name, folder, owner)
            below = os.open(name, FOLDER_FLAGS, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _make_folder(name: str, parent: int, owner: int | None) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
        if owner is not None:
            os.chown(name, owner, owner, dir_fd=parent, follow_symlinks=False)


def read_file(folder: int, name: str, max_bytes: int) -> bytes:
    """Return the bytes of a regular file, at most one more than `max_bytes`."""
    file = os.open(name, FILE_FLAGS, dir_fd=folder)
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "only regular files can be read", name)
        chunks: list[bytes] = []
        room = max_bytes + 1
        while chunk := os.read(file, min(room, CHUNK_BYTES)):
            chunks.append(chunk)
            room -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(file)


def write_file(folder: int, name: str, data: bytes, mode: int, owner: int | None = None) -> None:
    """Write a file in place of whatever has its name: a program may have put a FIFO or a link there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    file = os.open(name, NEW_FILE_FLAGS, mode, dir_fd=folder)
    try:
        write_all(file, data)
        if owner is not None:
            os.fchown(file, owner, owner)
    finally:
        os.close(file)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def entries_below(
    folder: int, max_bytes: int, max_depth: int, prefix: str = ""
) -> Iterator[tuple[str, bytes | None, bool]]:
    """Yield path, data (None for a folder) and whether it may be run, depth first; skip all but files and folders.

    The data of a file is at most one byte longer than `max_bytes`. Each level holds an open descriptor.
    """
    if prefix.count("/") > max_depth:
        raise OSError(errno.ENAMETOOLONG, f"deeper than {max_depth} folders", prefix)
    for name in sorted(os.listdir(folder)):
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            yield prefix + name, None, False
            with open_folder(folder, [name]) as below:
                yield from entries_below(below, max_bytes, max_depth, f"{prefix}{name}/")
        elif stat.S_ISREG(mode):
            yield prefix + name, read_file(folder, name, max_bytes), bool(mode & 0o100)


def remove_tree(root: str | os.PathLike[str]) -> None:
    """Remove a folder that hostile programs have filled, and may still be changing; OSError if some of it stays.

    The children of each folder in it are moved up into `root` before the folder goes, so that paths stay short, and
    few descriptors are open, however deep it was. Nothing follows a link, so nothing outside is touched.
    """
    try:
        top = _open_unlocked(root)
    except FileNotFoundError:
        return
    try:
        prefix = f".{os.urandom(8).hex()}-"  # a name that no program has taken
        new_names = (f"{prefix}{number}" for number in itertools.count())
        while names := os.listdir(top):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                    if _is_folder(name, top):
                        _lift_children(top, name, new_names)
                        os.rmdir(name, dir_fd=top)
                    else:
                        os.unlink(name, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(root)


def _lift_children(top: int, name: str, new_names: Iterator[str]) -> None:
    """Unlink the files of a folder and move its folders beside it."""
    folder = _open_unlocked(name, top)
    try:
        for child in os.listdir(folder):
            if _is_folder(child, folder):
                os.close(_open_unlocked(child, folder))  # moving a folder rewrites its '..'
                os.rename(child, next(new_names), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(child, dir_fd=folder)
    finally:
        os.close(folder)


def _open_unlocked(folder: str | os.PathLike[str], parent: int | None = None) -> int:
    """Open a folder, and let its owner read and change it."""
    try:
        opened = os.open(folder, FOLDER_FLAGS, dir_fd=parent)
    except PermissionError:  # it is locked, and we are not root
        os.chmod(folder, 0o700, dir_fd=parent, follow_symlinks=False)
        opened = os.open(folder, FOLDER_FLAGS, dir_fd=parent)
    with contextlib.suppress(OSError):  # it is not ours, and removing will fail
        os.fchmod(opened, 0o700)
    return opened


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
