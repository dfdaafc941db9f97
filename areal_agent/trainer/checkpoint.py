"""Checkpoint folders: published whole or not at all, found again, checked and pruned. Imports no torch.

    checkpoints/step_000012/      a Hugging Face folder: config.json, model.safetensors, tokenizer ...
                ├─ training/      what going on needs besides the weights: optimiser, updates, generator
                ├─ adapter/       adapters, where these are trained, in the format of PEFT
                ├─ run.json       what the rest of the run needs: its place in the data, what was leased
                └─ manifest.json  step, incarnation, and size and SHA-256 of every file; written last

A folder is written under a hidden name, brought to the disk, then renamed: under its own name it is complete. What is
removed or replaced steps aside first, by a rename too. A directory has one writer, who calls `recover` after a crash.

The moments at which a crash may fall while a train step becomes final, by name. It knows no file and no ledger.

    LEASED ─▶ TRAINED ─▶ PUSHED ─▶ ... ─▶ WRITTEN ─▶ DURABLE ─▶ (ASIDE) ─▶ PUBLISHED ─▶ PRUNED ─▶ COMMITTED
    then, in the next process: RECOVERED ─▶ RESTARTED

Whoever passes one says so to a `Passing`. In a run nobody listens; the test that kills a trainer at each of them does.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import orjson

from areal_agent.files import MANIFEST, bring_to_disk, encode_manifest, read_manifest, sync
from areal_agent.types import JsonObject

logger = logging.getLogger(__name__)


class CommitPoint(StrEnum):
    """What has just become true. What a crash here costs is said beside it."""

    LEASED = "leased"  # a batch is leased in the ledger: it waits again
    TRAINED = "trained"  # the weights hold its step, in memory alone: it waits again
    PUSHED = "pushed"  # engines serve those weights: their tokens stay trainable
    WRITTEN = "written"  # the checkpoint's files are there, under a hidden name: the folder is removed
    DURABLE = "durable"  # they are on the disk, still hidden: the same
    ASIDE = "aside"  # an older checkpoint of the same step has stepped aside: it comes back
    PUBLISHED = "published"  # the checkpoint bears its name and the ledger does not know: it counts
    PRUNED = "pruned"  # older checkpoints are removed
    COMMITTED = "committed"  # the ledger has it: what it holds is trained, once and for all
    RECOVERED = "recovered"  # after a crash: the folder of checkpoints is in order again
    RESTARTED = "restarted"  # after a crash: later leases wait again, in a new incarnation


Passing = Callable[[CommitPoint], None]
"""Hears of each point as it is passed."""


def pass_by(point: CommitPoint) -> None:
    """The `Passing` of every run: nobody listens."""


RUN_STATE = "run.json"
TRAINING = "training"
ADAPTER = "adapter"
NAME = re.compile(r"step_\d{6,}")
WRITING = ".writing-"
ASIDE = ".aside-"
REMOVING = ".removing-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    incarnation: int

    def run_state(self) -> JsonObject:
        """What the rest of the run gave it to keep."""
        return orjson.loads((self.path / RUN_STATE).read_bytes())


def publish_checkpoint(
    directory: Path,
    *,
    step: int,
    incarnation: int,
    run_state: JsonObject,
    write: Callable[[Path], None],
    keep_last: int,
    begun_with: Path | None = None,
    passing: Passing = pass_by,
) -> Checkpoint:
    """Write `directory/step_NNNNNN` with `write(folder)`, publish it in one rename, then remove all but `keep_last`.

    `begun_with` stays, too: engines that die are started again with it, and tokenizers are copied from there.
    A checkpoint of the same step that stands there already is replaced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory)
    folder = hidden_folder(directory, step)
    folder.mkdir()
    try:
        write(folder)
        (folder / RUN_STATE).write_bytes(orjson.dumps(run_state))
        (folder / MANIFEST).write_bytes(encode_manifest(folder, {"step": step, "incarnation": incarnation}))
        passing(CommitPoint.WRITTEN)
        bring_to_disk(folder)
        passing(CommitPoint.DURABLE)
        target = _name(directory, step)
        _step_aside(target, passing)
        folder.rename(target)
        sync(directory)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        recover(directory)
        raise
    passing(CommitPoint.PUBLISHED)
    recover(directory)
    _prune(directory, step, keep_last, begun_with)
    passing(CommitPoint.PRUNED)
    return Checkpoint(path=target, step=step, incarnation=incarnation)


def hidden_folder(directory: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name: the same for all who write to it."""
    return directory / f"{WRITING}step_{step:06d}"


def recover(directory: Path) -> None:
    """Put in order what a writer that died has left: what stepped aside comes back, unless it has been replaced."""
    for path in directory.glob(f"{ASIDE}*"):
        target = directory / path.name.removeprefix(ASIDE)
        if target.exists():
            _remove(path)
        else:
            path.rename(target)
    for path in (*directory.glob(f"{WRITING}*"), *directory.glob(f"{REMOVING}*")):
        shutil.rmtree(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint folder against its manifest, byte for byte. Raises ValueError saying what is wrong with it."""
    files, facts = read_manifest(path)
    try:
        step, incarnation = int(facts["step"]), int(facts["incarnation"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no readable {MANIFEST} ({error!r})") from None
    for name, digest in files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file} is missing")
        if not digest.is_of_file(file):
            raise ValueError(f"{file} is not what was written: its size or SHA-256 differs from {MANIFEST}")
    return Checkpoint(path=path, step=step, incarnation=incarnation)


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is not damaged, or None."""
    return next(intact_checkpoints(directory), None)


def newest_step(directory: Path) -> int:
    """The step of the newest one by name, whether intact or not; 0 when there is none. It reads no file."""
    return max(map(_step_of, _published(directory)), default=0)


def intact_checkpoints(directory: Path) -> Iterator[Checkpoint]:
    """The newest first. Damaged ones are passed over with a warning."""
    for path in reversed(_published(directory)):
        try:
            yield read_checkpoint(path)
        except ValueError as error:
            logger.warning("passing over a damaged checkpoint: %s", error)


def _name(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def _published(directory: Path) -> list[Path]:
    """Folders with the name of a checkpoint, by rising step."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if path.is_dir() and NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _step_aside(target: Path, passing: Passing) -> None:
    """A full folder cannot be renamed over: make room for the new one."""
    if target.exists():
        target.rename(target.with_name(f"{ASIDE}{target.name}"))
        passing(CommitPoint.ASIDE)


def _remove(path: Path) -> None:
    """Hidden first: half a folder must not be taken for a checkpoint."""
    hidden = path.with_name(f"{REMOVING}{path.name.removeprefix(ASIDE)}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _prune(directory: Path, newest_step: int, keep_last: int, begun_with: Path | None) -> None:
    """Keep the last ones up to `newest_step`. Later steps stand there only when a resume had to pass them over."""
    published = _published(directory)
    lineage = [path for path in published if _step_of(path) <= newest_step]
    for path in set(published) - set(lineage[-keep_last:]):
        if begun_with is None or path.resolve() != begun_with.resolve():
            _remove(path)
