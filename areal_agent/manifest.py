"""The manifest of a folder: size and SHA-256 of every file in it, by which a reader proves that it is whole.

    manifest.json   {"files": {"model.safetensors": {"num_bytes": 4194304, "sha256": "..."}}, ...}

It knows nothing of what the files hold. A manifest is written last, so a folder without one is not complete. A folder
is brought to the disk before it gets the name by which readers find it.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal_agent.types import JsonObject

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """What one file has to be."""

    num_bytes: int
    sha256: str

    def is_of(self, data: bytes) -> bool:
        """Whether these are the bytes that were written."""
        return len(data) == self.num_bytes and hashlib.sha256(data).hexdigest() == self.sha256

    def is_of_file(self, path: Path) -> bool:
        """Whether this file holds them; it is not kept in memory."""
        return path.stat().st_size == self.num_bytes and sha256_of(path) == self.sha256


def encode_manifest(folder: Path, facts: JsonObject) -> bytes:
    """The manifest of all files that are in the folder now; `facts` stand beside them."""
    files = {
        path.relative_to(folder).as_posix(): {"num_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return orjson.dumps({**facts, "files": files}, option=orjson.OPT_INDENT_2)


def read_manifest(folder: Path) -> tuple[Mapping[str, FileDigest], JsonObject]:
    """Every file by its name, and all that the manifest says. Raises ValueError when it cannot be read."""
    try:
        fields: dict[str, Any] = orjson.loads((folder / MANIFEST).read_bytes())
        files: dict[str, dict[str, Any]] = fields["files"]
        digests = {
            name: FileDigest(num_bytes=int(one["num_bytes"]), sha256=str(one["sha256"])) for name, one in files.items()
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} has no readable {MANIFEST} ({error!r:.200})") from None
    return digests, fields


def sha256_of(path: Path) -> str:
    """Of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bring_to_disk(folder: Path) -> None:
    """All files and folders in it, and itself: what a power loss leaves."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """One file, or the names in one folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
