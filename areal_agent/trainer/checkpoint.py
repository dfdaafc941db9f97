"""Checkpoint folders: published whole or not at all, found again, checked and pruned. Imports no torch.

    checkpoints/step_000012/      a Hugging Face folder: config.json, model.safetensors, tokenizer ...
                ├─ training/      what going on needs besides the weights: optimiser, updates, generator
                └─ manifest.json  step, incarnation, and size and SHA-256 of every file; written last

A folder is written under a hidden name, brought to the disk, then renamed: under its own name it is complete.
"""

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

MANIFEST = "manifest.json"
TRAINING = "training"
NAME = re.compile(r"step_\d{6,}")
HIDDEN_PREFIX = ".writing-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    incarnation: int


def publish_checkpoint(
    directory: Path, *, step: int, incarnation: int, write: Callable[[Path], None], keep_last: int
) -> Checkpoint:
    """Write `directory/step_NNNNNN` with `write(folder)`, publish it in one rename, then remove all but `keep_last`.

    A checkpoint of the same step that stands there already is replaced. There is one writer a directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(directory)
    target = directory / f"step_{step:06d}"
    folder = Path(tempfile.mkdtemp(prefix=HIDDEN_PREFIX, dir=directory))
    try:
        write(folder)
        (folder / MANIFEST).write_bytes(_manifest(folder, step, incarnation))
        _bring_to_disk(folder)
        _replace(target, folder)
        _sync(directory)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _prune(directory, step, keep_last)
    return Checkpoint(path=target, step=step, incarnation=incarnation)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint folder against its manifest, byte for byte. Raises ValueError saying what is wrong with it."""
    try:
        manifest: dict[str, Any] = orjson.loads((path / MANIFEST).read_bytes())
        files: dict[str, dict[str, Any]] = manifest["files"]
        step, incarnation = int(manifest["step"]), int(manifest["incarnation"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no readable {MANIFEST} ({error})") from None
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        if file.stat().st_size != expected["num_bytes"] or _sha256(file) != expected["sha256"]:
            raise ValueError(f"{file} is not what was written: its size or SHA-256 differs from {MANIFEST}")
    return Checkpoint(path=path, step=step, incarnation=incarnation)


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest checkpoint to resume from, or None. Damaged ones are passed over with a warning."""
    for path in reversed(_published(directory)):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)
    return None


def _published(directory: Path) -> list[Path]:
    """Folders with the name of a checkpoint, by rising step."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if path.is_dir() and NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _manifest(folder: Path, step: int, incarnation: int) -> bytes:
    files = {
        path.relative_to(folder).as_posix(): {"num_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return orjson.dumps({"step": step, "incarnation": incarnation, "files": files}, option=orjson.OPT_INDENT_2)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bring_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(target: Path, folder: Path) -> None:
    """Rename `folder` to `target`. A full folder cannot be renamed over: an old one steps aside first."""
    if target.exists():
        aside = Path(tempfile.mkdtemp(prefix=HIDDEN_PREFIX, dir=target.parent))
        target.rename(aside / target.name)
        folder.rename(target)
        shutil.rmtree(aside)
    else:
        folder.rename(target)


def _remove_unfinished(directory: Path) -> None:
    """What killed writers left behind."""
    for path in directory.glob(f"{HIDDEN_PREFIX}*"):
        shutil.rmtree(path)


def _prune(directory: Path, newest_step: int, keep_last: int) -> None:
    """Keep the last ones up to `newest_step`. Later steps stand there only when a resume had to pass them over."""
    published = _published(directory)
    lineage = [path for path in published if _step_of(path) <= newest_step]
    for path in set(published) - set(lineage[-keep_last:]):
        shutil.rmtree(path)
