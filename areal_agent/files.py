"""Files on disk: manifests that prove a folder whole, claims to a folder, the folder of a run, and private files.

A manifest has the size and SHA-256 of every file beside it. It is written last, so a folder without one is not
complete; a folder is synced to disk before it gets the name by which readers find it::

    manifest.json   {"files": {"model.safetensors": {"num_bytes": 4194304, "sha256": "..."}}, ...}

The folder of a run::

    config.yaml  ledger.sqlite  metrics.jsonl  checkpoints/  logs/  curve.png  summary.json
    token_records/ (what the trainer saw of single tokens, for a share of the trajectories)
    model/         (the tiny model that it began with; a resume needs no other copy)
    images/        (the images of its conversations, by their SHA-256)
    engines_url  admin_key     (only while the run goes on)

With `cluster.shared_dir`, what other machines read or write is in a folder of the run's name there, to which the run's
own folder has links; beside it lies what has to survive the machine of the run's own folder::

    checkpoints/  token_records/  model/  images/      (links lead here)
    config.yaml  metrics.jsonl  progress.json  ledger/ (snapshots)

Only one incarnation of a run may publish checkpoints and snapshots: the one whose number is the highest in a file
`checkpoints/incarnation_NNNNNN`, which it has made when it began. It looks there right before each rename.
"""

import errno
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import orjson

from areal_agent.errors import ConfigError, TakenOver, unwritable
from areal_agent.types import JsonObject

MANIFEST = "manifest.json"
CLAIM = "incarnation_"


def require_no_gguf(model: str, what: str = "model") -> None:
    """Raise ConfigError for a GGUF file, or a folder that has nothing else."""
    path = Path(model)
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))):
        raise ConfigError(
            f"{what} {model!r} is GGUF, whose weights are quantised; give the model that it was made of, as a Hugging "
            "Face folder with safetensors or a hub name (org/name)"
        )


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


def no_device(path: Path) -> Path:
    """Return the path of what is to be read. Raises OSError for a device or a pipe, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device or a pipe, and no file", str(path))
    return path


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
        fields: dict[str, Any] = orjson.loads(no_device(folder / MANIFEST).read_bytes())
        files: dict[str, dict[str, Any]] = fields["files"]
        digests = {
            name: FileDigest(num_bytes=int(one["num_bytes"]), sha256=str(one["sha256"])) for name, one in files.items()
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} has no readable {MANIFEST} ({error!r:.200})") from None
    return digests, fields


def read_intact(folder: Path) -> JsonObject:
    """Return the manifest of a folder that agrees with it byte for byte. Raises ValueError that says what is wrong."""
    files, facts = read_manifest(folder)
    for name, digest in files.items():
        file = folder / name
        try:
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            if not digest.is_of_file(file):
                raise ValueError(f"{file} is not what was written: its size or SHA-256 differs from {MANIFEST}")
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    return facts


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


def newest_claim(directory: Path) -> int:
    """Return the incarnation that may publish in a directory; -1 when none has claimed it."""
    return max(map(_number_of, directory.glob(f"{CLAIM}*")), default=-1)


def claim(directory: Path, incarnation: int) -> None:
    """Let this incarnation alone publish in a directory. Raises TakenOver when it, or a later one, holds that."""
    directory.mkdir(parents=True, exist_ok=True)
    require_claim(directory, incarnation)
    try:
        create_private(directory / f"{CLAIM}{incarnation:06d}", f"{socket.gethostname()}, process {os.getpid()}")
    except FileExistsError:
        require_claim(directory, incarnation - 1)
    for path in directory.glob(f"{CLAIM}*"):
        if _number_of(path) < incarnation:
            path.unlink(missing_ok=True)
    sync(directory)


def require_claim(directory: Path, incarnation: int) -> None:
    """Raise TakenOver when a later incarnation may publish in a directory."""
    if (newest := newest_claim(directory)) <= incarnation:
        return
    path = directory / f"{CLAIM}{newest:06d}"
    raise TakenOver(
        f"incarnation {newest} of this run ({path.read_text().strip()}) has claimed {directory}, so this process may "
        f"publish nothing there; go on with that one, or delete {path} if it is gone for good and this folder is newer"
    )


def _number_of(claim: Path) -> int:
    return int(claim.name.removeprefix(CLAIM))


class RunFolder:
    """The paths of one run. The folder is private to its owner: it holds prompts, answers and key hashes."""

    def __init__(self, path: Path, shared: Path | None = None) -> None:
        """`shared` is its part of `cluster.shared_dir`; by default what its links say, or `path` itself."""
        if shared is None:
            link = path / "checkpoints"
            shared = link.readlink().parent if link.is_symlink() else path
        self.path = path
        self.shared = shared
        self.config = path / "config.yaml"
        self.ledger = path / "ledger.sqlite"
        self.metrics = path / "metrics.jsonl"
        self.model = shared / "model"
        self.checkpoints = shared / "checkpoints"
        self.token_records = shared / "token_records"
        self.images = shared / "images"
        self.snapshots = shared / "ledger"  # with `cluster.shared_dir`, as the next
        self.progress = shared / "progress.json"
        self.logs = path / "logs"
        self.curve = path / "curve.png"
        self.summary = path / "summary.json"
        self.engines_url = path / "engines_url"  # of `/rl/engines`, while the run goes on
        self.admin_key = path / "admin_key"  # for `/rl/engines`, while the run goes on

    @property
    def is_divided(self) -> bool:
        """Return whether a part of it is in `cluster.shared_dir`."""
        return self.shared != self.path

    @classmethod
    def choose(cls, run_dir: str | None, name: str, shared_dir: Path | None = None) -> Self:
        """Return the folder of a new run: `run_dir`, or the first free one of `runs/<name>`, `runs/<name>-2`, ...

        Raises ConfigError when `run_dir`, or its name in `shared_dir`, is taken or cannot be made. Leaves nothing on
        disk.
        """

        def shared(path: Path) -> Path | None:
            return None if shared_dir is None else shared_dir / path.absolute().name

        if run_dir is None:
            number = 1
            path = Path("runs") / name
            while not (is_free(path) and is_free(shared(path) or path)):
                number += 1
                path = Path("runs") / f"{name}-{number}"
            return cls(path, shared(path))
        path = Path(run_dir)
        if not run_dir or (path.exists() and not path.is_dir()):
            raise ConfigError(f"run_dir {run_dir!r} is not a folder; name one that does not exist yet")
        if not is_free(path):
            remedy = f"resume it with --resume {run_dir}" if cls(path).config.is_file() else "it is no run"
            raise ConfigError(f"run_dir {run_dir!r} exists and is not empty; {remedy}, or name another")
        require_room(path)
        if (there := shared(path)) is not None:
            if there == path.absolute():
                raise ConfigError(f"run_dir {run_dir!r} lies in cluster.shared_dir; name another, or leave that out")
            if not is_free(there):
                raise ConfigError(f"{str(there)!r} is of an earlier run; resume it with --resume {there}, or delete it")
            require_room(there)
        return cls(path, there)

    @classmethod
    def reopen(cls, given: str, run_dir: str | None = None) -> Self:
        """Return the folder of a run to resume, or of one to restore, whose ledger is not there yet.

        What is `given` is the run's folder, or its part of `cluster.shared_dir`, which is restored into `run_dir`.
        Raises ConfigError when it is neither, when the folder to be restored exists, or when what is shared is away.
        """
        folder = cls(Path(given))
        if folder.snapshots.is_dir() and not folder.is_divided:
            shared = Path(os.path.abspath(given))
            path = Path(run_dir or f"runs/{shared.name}")
            if path.exists():
                raise ConfigError(
                    f"--resume {given!r}: the run's own folder {str(path)!r} exists on this machine and may be newer; "
                    f"resume it with --resume {path}, or name another with run_dir=DIR"
                )
            require_room(path)
            return cls(path, shared)
        for needed in (folder.config, folder.ledger):
            if not needed.is_file():
                raise ConfigError(f"--resume {given!r} is not a run folder: it has no {needed.name}")
        if folder.is_divided and not folder.checkpoints.is_dir():  # or it would begin anew, and train all of it twice
            raise ConfigError(
                f"--resume {given!r}: its checkpoints are in {str(folder.checkpoints)!r}, which is away; bring it "
                "back, or make that folder to begin with the initial weights again"
            )
        return folder

    def give_up(self, *, keep_logs: bool) -> None:
        """Delete the folder of a run that could not be started, so that the next one gets its name.

        Its logs may be kept: they have the cause, and a folder with nothing else counts as free.
        """
        if self.is_divided:
            shutil.rmtree(self.shared, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(self.path, ignore_errors=True)
        for path in self.path.glob("*"):
            if path.is_dir() and not path.is_symlink() and path != self.logs:
                shutil.rmtree(path, ignore_errors=True)
            elif path != self.logs:
                path.unlink(missing_ok=True)

    def make(self) -> None:
        try:
            for path in (self.path, self.shared):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.chmod(0o700)
            self.checkpoints.mkdir(exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            if self.is_divided:
                self.snapshots.mkdir(exist_ok=True)
                self.images.mkdir(exist_ok=True)
                for there in (self.model, self.checkpoints, self.token_records, self.images):
                    link = self.path / there.name
                    link.unlink(missing_ok=True)
                    link.symlink_to(there)
        except OSError as error:
            raise ConfigError(f"run_dir {str(self.path)!r} cannot be made: {error}") from None

    def keep_config(self, text: str) -> None:
        """Write the run's config, also where a run is restored from."""
        for path in {self.path, self.shared}:
            try:
                (path / self.config.name).write_text(text)
            except OSError as error:
                raise unwritable(path / self.config.name, error) from error

    @property
    def is_completed(self) -> bool:
        """Return whether the run ended as it should, according to its summary."""
        try:
            summary: object = orjson.loads(no_device(self.summary).read_bytes())
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
