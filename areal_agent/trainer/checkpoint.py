"""Checkpoint folders: published whole or not at all, found again, checked and pruned. Imports no torch.

    checkpoints/step_000012/      a Hugging Face folder: config.json, model.safetensors, tokenizer ...
                ├─ training/      what resuming needs besides the weights: optimiser, updates, generator
                ├─ adapter/       the adapters in PEFT's format, if the run trains adapters
                ├─ run.json       what the rest of the run needs: its place in the data, the leased tasks
                └─ manifest.json  step, incarnation, and size and SHA-256 of every file; written last

A folder is written under a hidden name, synced to disk, then renamed, so a folder with a checkpoint's name is complete.
A folder that is removed or replaced is first renamed to a hidden name as well. A directory has one writer, the
incarnation that has claimed it (files.py), which calls `recover` after a crash. Between its last look at the claim and
the rename is one system call; a checkpoint that came so late would be passed over at a resume, as of another lineage.

A train step becomes final in these stages, and a crash may fall between any two of them:

    LEASED ─▶ TRAINED ─▶ PUSHED ─▶ ... ─▶ WRITTEN ─▶ DURABLE ─▶ (ASIDE) ─▶ PUBLISHED ─▶ PRUNED ─▶ COMMITTED
    then, in the next process: RECOVERED ─▶ RESTARTED

The code reports each stage to a `Passing`. A run ignores these reports; a test kills the trainer at each of them.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import orjson

from areal_agent.errors import TrainerError
from areal_agent.files import MANIFEST, bring_to_disk, encode_manifest, read_intact, require_claim, sync
from areal_agent.types import JsonObject

logger = logging.getLogger(__name__)
RUN_STATE = "run.json"
TRAINING = "training"
ADAPTER = "adapter"
FOR_RESUMES = (TRAINING, RUN_STATE, MANIFEST)
"""The parts of a checkpoint that only a resume needs; the rest is a Hugging Face folder."""
NAME = re.compile(r"step_\d{6,}")
WRITING = ".writing-"
ASIDE = ".aside-"
REMOVING = ".removing-"


MAX_FAILED_SAVES = 3
"""A run ends when so many saves in a row could not be written."""


class FailedSaves:
    """The saves to `directory` that have failed since one succeeded; training survives a few. `clear` empties it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._faults: list[str] = []
        self.clear = self._faults.clear

    def add(self, step: int, fault: str) -> str:
        """Count one more, and return what to say about it. Raises TrainerError when there are MAX_FAILED_SAVES."""
        self._faults.append(fault)
        if len(self._faults) >= MAX_FAILED_SAVES:
            self.check()
        return (
            f"step {step}: no checkpoint could be written to {self._directory} ({fault}); training goes on, and ends "
            f"if {MAX_FAILED_SAVES} saves fail in a row (until now {len(self._faults)})"
        )

    def check(self) -> None:
        """Raise TrainerError if the last save failed."""
        if self._faults:
            raise TrainerError(
                f"{len(self._faults)} saves in a row could not be written to {self._directory}, the last because of "
                f"{self._faults[-1]}; make room there or bring the folder back, and resume the run"
            )


class CommitPoint(StrEnum):
    """A stage that a train step has just reached. The comments say what a crash at that moment costs."""

    LEASED = "leased"  # a batch is leased in the ledger; after a crash it waits again
    TRAINED = "trained"  # the weights include the batch, in memory only; after a crash it waits again
    PUSHED = "pushed"  # engines serve those weights; their tokens stay trainable
    WRITTEN = "written"  # the checkpoint's files exist under a hidden name; a crash removes the folder
    DURABLE = "durable"  # the files are synced to disk, still hidden; a crash removes the folder
    ASIDE = "aside"  # an older checkpoint of the same step was renamed; a crash restores it
    PUBLISHED = "published"  # the checkpoint has its name but the ledger has no entry yet; it counts
    PRUNED = "pruned"  # older checkpoints are removed
    COMMITTED = "committed"  # the ledger has recorded the step: the batch counts as trained for good
    RECOVERED = "recovered"  # after a crash: the checkpoint directory is in order again
    RESTARTED = "restarted"  # after a crash: batches leased later wait again, in a new incarnation


Passing = Callable[[CommitPoint], None]
"""A function that is called at each point as it is passed."""


def pass_by(point: CommitPoint) -> None:
    """Ignore the point. Every run uses this `Passing`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    incarnation: int

    def run_state(self) -> JsonObject:
        """Return what the rest of the run stored in the checkpoint."""
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

    `begun_with` is kept as well, because engines are restarted from it and tokenizers are copied from it.
    An existing checkpoint of the same step is replaced. Raises TakenOver when a later incarnation has claimed
    `directory`, whose folders are then left alone.
    """
    directory.mkdir(exist_ok=True)  # without its parents: where they are missing, a shared disk is away
    require_claim(directory, incarnation)
    recover(directory)
    folder = hidden_folder(directory, step, incarnation)
    folder.mkdir()
    try:
        write(folder)
        (folder / RUN_STATE).write_bytes(orjson.dumps(run_state))
        (folder / MANIFEST).write_bytes(encode_manifest(folder, {"step": step, "incarnation": incarnation}))
        passing(CommitPoint.WRITTEN)
        bring_to_disk(folder)
        passing(CommitPoint.DURABLE)
        require_claim(directory, incarnation)
        target = directory / f"step_{step:06d}"
        if target.exists():  # a full folder cannot be renamed over
            target.rename(target.with_name(f"{ASIDE}{target.name}"))
            passing(CommitPoint.ASIDE)
        folder.rename(target)
        sync(directory)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        require_claim(directory, incarnation)  # the later one may have removed our files: then this is the cause
        recover(directory)
        raise
    passing(CommitPoint.PUBLISHED)
    recover(directory)
    _prune(directory, step, keep_last, begun_with)
    passing(CommitPoint.PRUNED)
    return Checkpoint(path=target, step=step, incarnation=incarnation)


def hidden_folder(directory: Path, step: int, incarnation: int) -> Path:
    """Return the folder that a checkpoint is written to before it is renamed. Every rank gets the same one.

    An incarnation that was taken over and does not know it yet writes to another one.
    """
    return directory / f"{WRITING}step_{step:06d}-{incarnation}"


def recover(directory: Path) -> None:
    """Clean up after a writer that died: restore a folder that was moved aside, unless it has been replaced."""
    for path in directory.glob(f"{ASIDE}*"):
        target = directory / path.name.removeprefix(ASIDE)
        if target.exists():
            _remove(path)
        else:
            path.rename(target)
    for path in (*directory.glob(f"{WRITING}*"), *directory.glob(f"{REMOVING}*")):
        shutil.rmtree(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint folder against its manifest, byte for byte. Raises ValueError that says what is wrong."""
    facts = read_intact(path)
    try:
        step, incarnation = int(facts["step"]), int(facts["incarnation"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no readable {MANIFEST} ({error!r})") from None
    return Checkpoint(path=path, step=step, incarnation=incarnation)


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the newest checkpoint that is not damaged, or None."""
    return next(intact_checkpoints(directory), None)


def newest_step(directory: Path) -> int:
    """Return the highest step of any checkpoint folder by name, intact or not; 0 when there is none. Reads no file."""
    return max(map(_step_of, _published(directory)), default=0)


def intact_checkpoints(directory: Path) -> Iterator[Checkpoint]:
    """Yield the intact checkpoints, newest first. Damaged ones are skipped with a warning."""
    for path in reversed(_published(directory)):
        try:
            yield read_checkpoint(path)
        except ValueError as error:
            logger.warning("skipping a damaged checkpoint: %s", error)


def _published(directory: Path) -> list[Path]:
    """Return the folders that have a checkpoint's name, by ascending step."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if path.is_dir() and NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _remove(path: Path) -> None:
    """Hide the folder before deleting it, so that half a folder is never taken for a checkpoint."""
    hidden = path.with_name(f"{REMOVING}{path.name.removeprefix(ASIDE)}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _prune(directory: Path, newest_step: int, keep_last: int, begun_with: Path | None) -> None:
    """Keep the last ones up to `newest_step`. Later steps exist only when a resume had to skip them."""
    published = _published(directory)
    lineage = [path for path in published if _step_of(path) <= newest_step]
    for path in set(published) - set(lineage[-keep_last:]):
        if begun_with is None or path.resolve() != begun_with.resolve():
            _remove(path)
