"""The working directory of one sandbox, which the host reads and writes; and tars of its files.

What a program leaves in the directory is not to be trusted: no symlink is followed, and only regular files are read. A
file that is not as expected raises OSError, as opening a file does: the program is at fault, not the sandbox.

A tar from outside is hostile too: links, devices and paths that lead out are refused. A sandbox only gets a tar made
anew from what was understood here, so that two readers cannot read it in two ways.

All of it blocks: callers use a thread.
"""

import errno
import io
import os
import tarfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.agent import wire
from sandboxes.agent.files import entries_below, open_folder, read_file, write_file
from sandboxes.spec import folder_parts, relative_parts

TAR_BLOCK_BYTES = 512  # the least that an entry takes
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Entry:
    """A file with its data, or a folder, which has none."""

    path: str
    data: bytes | None
    is_executable: bool = False


class OpenFolder:
    """Files beneath an open folder, which the caller still owns. Written files belong to `owner`, or to this user."""

    def __init__(self, top: int, owner: int | None = None) -> None:
        self._top = top
        self._owner = owner

    def read(self, path: str, max_bytes: int) -> bytes:
        """Return the bytes of a regular file of at most `max_bytes`."""
        *parents, name = relative_parts(path)
        with open_folder(self._top, parents) as folder:
            data = read_file(folder, name, max_bytes)
        if len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"longer than Limits.file_bytes, {max_bytes}", path)
        return data

    def write(self, path: str, data: bytes, *, is_executable: bool = False) -> None:
        """Write a file, replacing any old one, and make its parent folders."""
        *parents, name = relative_parts(path)
        with open_folder(self._top, parents, create=True, owner=self._owner) as folder:
            write_file(folder, name, data, 0o700 if is_executable else 0o600, self._owner)

    def make_folder(self, path: str) -> None:
        """Make a folder and its parents; harmless when it exists."""
        with open_folder(self._top, folder_parts(path), create=True, owner=self._owner):
            pass

    def entries(self, path: str, max_bytes: int) -> Generator[Entry, None, None]:
        """Yield the files and folders beneath a folder; OSError when they exceed `max_bytes` or are too deep."""
        room = max_bytes
        with open_folder(self._top, folder_parts(path)) as folder:
            for name, data, is_executable in entries_below(folder, max_bytes, MAX_DEPTH):
                room -= TAR_BLOCK_BYTES + len(data or b"")
                if room < 0:
                    raise OSError(errno.EFBIG, f"its files are more than max_bytes, {max_bytes}", path)
                yield Entry(path=name, data=data, is_executable=is_executable)


def pack(entries: Iterable[Entry]) -> bytes:
    """Return a tar of these entries."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            member = tarfile.TarInfo(entry.path)
            if entry.data is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            else:
                member.size, member.mode = len(entry.data), 0o755 if entry.is_executable else 0o644
                tar.addfile(member, io.BytesIO(entry.data))
    return buffer.getvalue()


def entries_of(tar: bytes) -> list[Entry]:
    """Return the entries of a tar; ValueError if it is broken or holds anything but files and folders inside it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:", encoding="utf-8", errors="surrogateescape") as opened:
            return [_entry_of(opened, member) for member in opened if folder_parts(member.name)]
    except (tarfile.TarError, PermissionError, OverflowError) as error:
        raise ValueError(f"a sandbox cannot take this tar: {error}") from error


def entries_in(folder: Path) -> list[Entry]:
    """Return the entries of a folder of the host; ValueError when anything in it is neither file nor folder."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is not a folder; give a folder, or the bytes of a tar")
    return list(_entries_in_folder(folder))


def for_agent(entries: Iterable[Entry]) -> bytes:
    """Return entries as an agent reads them."""
    texts: list[bytes] = []
    for entry in entries:
        kind = wire.FOLDER if entry.data is None else wire.EXECUTABLE if entry.is_executable else wire.FILE
        texts += kind, os.fsencode(entry.path), entry.data or b""
    return wire.pack(*texts)


def of_agent(packed: bytes, max_bytes: int) -> list[Entry]:
    """Return the entries that a sandbox lists; OSError when they exceed `max_bytes`, or are malformed."""
    try:
        texts = wire.unpack(packed, 3 * (max_bytes // TAR_BLOCK_BYTES + 1))
        if sum(map(len, texts[2::3])) + len(texts[2::3]) * TAR_BLOCK_BYTES > max_bytes:
            raise OSError(errno.EFBIG, f"its files are more than max_bytes, {max_bytes}")
        return [
            Entry(
                "/".join(relative_parts(os.fsdecode(path))),
                None if kind == wire.FOLDER else data,
                kind == wire.EXECUTABLE,
            )
            for kind, path, data in zip(texts[::3], texts[1::3], texts[2::3], strict=True)
        ]
    except ValueError as error:
        raise OSError(f"the files of this sandbox cannot be listed: {error}") from error


def _entry_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    if member.isdir():
        return Entry(path=member.name, data=None)
    if not member.isreg() or member.issparse():
        raise ValueError(f"the tar holds {member.name!r}, which is neither a file nor a folder; leave it out")
    file = tar.extractfile(member)
    assert file is not None  # it is None only for links and devices
    data = file.read()
    if len(data) != member.size:
        raise ValueError(f"the tar ends within {member.name!r}")
    return Entry(path=member.name, data=data, is_executable=bool(member.mode & 0o100))


def _entries_in_folder(folder: Path) -> Iterator[Entry]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{str(path)!r} is neither a file nor a folder; leave it out")
        is_file = path.is_file()
        yield Entry(
            path=name, data=path.read_bytes() if is_file else None, is_executable=is_file and os.access(path, os.X_OK)
        )
