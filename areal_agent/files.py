"""Files on disk: manifests that prove a folder whole, the folder of a run, and files that only their owner may read.

A manifest has the size and SHA-256 of every file beside it. It is written last, so a folder without one is not
complete; a folder is synced to disk before it gets the name by which readers find it::

    manifest.json   {"files": {"model.safetensors": {"num_bytes": 4194304, "sha256": "..."}}, ...}

The folder of a run::

    config.yaml  ledger.sqlite  metrics.jsonl  checkpoints/  logs/  curve.png  summary.json
    token_records/ (what the trainer saw of single tokens, for a share of the trajectories)
    model/         (the tiny model that it began with; a resume needs no other copy)
    engines_url  admin_key     (only while the run goes on)
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import orjson

from areal_agent.errors import ConfigError
from areal_agent.types import JsonObject

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """The size and hash that a file must have."""

    num_bytes: int
    sha256: str

    def is_of(self, data: bytes) -> bool:
        """Return whether `data` is exactly what was written."""
        return len(data) == self.num_bytes and hashlib.sha256(data).hexdigest() == self.sha256

    def is_of_file(self, path: Path) -> bool:
        """Return whether the file holds exactly what was written, without reading it into memory at once."""
        return path.stat().st_size == self.num_bytes and sha256_of(path) == self.sha256


def encode_manifest(folder: Path, facts: JsonObject) -> bytes:
    """Return a manifest of all files that are in the folder now, with `facts` beside them."""
    files = {
        path.relative_to(folder).as_posix(): {"num_bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return orjson.dumps({**facts, "files": files}, option=orjson.OPT_INDENT_2)


def read_manifest(folder: Path) -> tuple[Mapping[str, FileDigest], JsonObject]:
    """Return the digest of every file by name, and the whole manifest. Raises ValueError when it cannot be read."""
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
    """Return the SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bring_to_disk(folder: Path) -> None:
    """Sync a folder and everything in it, so that it survives a power loss."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Sync one file, or the names in one folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RunFolder:
    """The paths of one run. The folder is private to its owner: it holds prompts, answers and key hashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.ledger = path / "ledger.sqlite"
        self.metrics = path / "metrics.jsonl"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.curve = path / "curve.png"
        self.summary = path / "summary.json"
        self.engines_url = path / "engines_url"  # of `/rl/engines`, while the run goes on
        self.admin_key = path / "admin_key"  # for `/rl/engines`, while the run goes on

    @classmethod
    def choose(cls, run_dir: str | None, name: str) -> Self:
        """Return the folder of a new run: `run_dir`, or the first free one of `runs/<name>`, `runs/<name>-2`, ...

        Raises ConfigError when `run_dir` is taken or cannot be made. Leaves nothing on disk.
        """
        if run_dir is None:
            number = 1
            path = Path("runs") / name
            while not is_free(path):
                number += 1
                path = Path("runs") / f"{name}-{number}"
            return cls(path)
        path = Path(run_dir)
        if not run_dir or (path.exists() and not path.is_dir()):
            raise ConfigError(f"run_dir {run_dir!r} is not a folder; name one that does not exist yet")
        if not is_free(path):
            raise ConfigError(
                f"run_dir {run_dir!r} exists and is not empty; resume it with --resume {run_dir}, or name another"
            )
        require_room(path)
        return cls(path)

    @classmethod
    def reopen(cls, run_dir: str) -> Self:
        """Return the folder of a run to resume. Raises ConfigError when it is no run folder."""
        folder = cls(Path(run_dir))
        for needed in (folder.config, folder.ledger):
            if not needed.is_file():
                raise ConfigError(f"--resume {run_dir!r} is not a run folder: it has no {needed.name}")
        return folder

    def give_up(self, *, keep_logs: bool) -> None:
        """Delete the folder of a run that could not be started, so that the next one gets its name.

        Its logs may be kept: they have the cause, and a folder with nothing else counts as free.
        """
        if not keep_logs:
            shutil.rmtree(self.path, ignore_errors=True)
        for path in self.path.glob("*"):
            if path.is_dir() and path != self.logs:
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.logs:
                path.unlink(missing_ok=True)

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.chmod(0o700)
            self.checkpoints.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run_dir {str(self.path)!r} cannot be made: {error.strerror}") from None

    @property
    def is_completed(self) -> bool:
        """Return whether the run ended as it should, according to its summary."""
        try:
            summary: object = json.loads(self.summary.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(summary, dict) and cast(dict[str, object], summary).get("status") == "completed"


def is_free(path: Path) -> bool:
    """Return whether a new run may have this folder: nothing is there but the logs of a run that did not start."""
    if not path.exists():
        return True
    return path.is_dir() and {one.name for one in path.iterdir()} <= {RunFolder(path).logs.name}


def require_room(path: Path) -> None:
    """Raise ConfigError unless a folder can be made there. It is tried, for permissions do not always tell."""
    parent = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".areal-agent-", dir=parent)).rmdir()
    except OSError as error:
        raise ConfigError(
            f"run_dir {str(path)!r} cannot be made: nothing can be written to {str(parent)!r} ({error.strerror}); name "
            "another folder"
        ) from None


def create_private(path: Path, text: str) -> None:
    """Write a line into a new file with mode 0600. Raises OSError, also when the file exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")


def replace_private(path: Path, text: str) -> None:
    """Replace a file by one line, atomically, with mode 0600. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    create_private(part, text)
    os.replace(part, path)
