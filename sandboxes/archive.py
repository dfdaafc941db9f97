"""Tars of regular files and folders: made of a folder, checked, and made anew. It knows no sandbox. Blocking.

A tar from anywhere else is hostile: whatever is neither file nor folder is refused, and so is a path that leads out.
What goes on into a sandbox is made anew of what was understood here, so that two readers cannot read it in two ways.
"""

import io
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.paths import folder_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file, or a folder, which has no data."""

    path: str
    data: bytes | None
    is_executable: bool = False


def pack(entries: Iterable[Entry]) -> bytes:
    """The tar of these entries."""
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
    """What a tar holds; ValueError for one that is broken or holds anything but files and folders inside it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(tar), mode="r:", encoding="utf-8", errors="surrogateescape") as opened:
            return [_entry_of(opened, member) for member in opened if folder_parts(member.name)]
    except (tarfile.TarError, PermissionError, OverflowError) as error:
        raise ValueError(f"not a tar that a sandbox takes: {error}") from error


def checked(tar: bytes) -> bytes:
    """The same files and folders, in a tar of our own making."""
    return pack(entries_of(tar))


def pack_folder(folder: Path) -> bytes:
    """The tar of a folder of the host; ValueError when anything in it is neither file nor folder."""
    if not folder.is_dir():
        raise NotADirectoryError(f"{str(folder)!r} is no folder; give one, or the bytes of a tar")
    return pack(_entries_below(folder))


def _entry_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Entry:
    if member.isdir():
        return Entry(path=member.name, data=None)
    if not member.isreg() or member.issparse():
        raise ValueError(f"the tar holds {member.name!r}, which is neither a file nor a folder; leave it out")
    file = tar.extractfile(member)
    assert file is not None  # it is for links and devices
    data = file.read()
    if len(data) != member.size:
        raise ValueError(f"the tar ends within {member.name!r}")
    return Entry(path=member.name, data=data, is_executable=bool(member.mode & 0o100))


def _entries_below(folder: Path) -> Iterator[Entry]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{str(path)!r} is neither a file nor a folder; leave it out")
        is_file = path.is_file()
        yield Entry(
            path=name,
            data=path.read_bytes() if is_file else None,
            is_executable=is_file and os.access(path, os.X_OK),
        )
