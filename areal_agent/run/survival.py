"""What a run leaves in its part of `cluster.shared_dir`, so that it survives the machine of its ledger.

::

    at each push         its claim is looked at; progress.json: the step, and how many rollouts have ended
    at each checkpoint   a snapshot of the ledger, and metrics.jsonl; before the checkpoint counts
    --resume SHARED      a new run folder from the snapshot; what progress.json is ahead of it is lost

The snapshot comes before its checkpoint, so the newest checkpoint always has a snapshot that knows its leases.
"""

import asyncio
import logging
import shutil

import orjson

from areal_agent.files import RunFolder, newest_claim, replace_private, require_claim
from areal_agent.ledger import questions
from areal_agent.ledger.files import reading
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.snapshots import SnapshotFolder
from areal_agent.ledger.snapshots import restore as restore_ledger

logger = logging.getLogger(__name__)


class Survival:
    """Keeps one incarnation of a run restorable, if it has a part in `cluster.shared_dir`. Raises TakenOver."""

    def __init__(self, folder: RunFolder, ledger: Ledger, incarnation: int) -> None:
        self._folder = folder
        self._ledger = ledger
        self._incarnation = incarnation
        self._snapshots = SnapshotFolder(
            ledger.path, folder.snapshots, checkpoints=folder.checkpoints, incarnation=incarnation
        )

    async def pushing(self, step: int) -> None:
        """Note that the weights of `step` are about to be pushed, which a later incarnation forbids."""
        try:
            await asyncio.to_thread(require_claim, self._folder.checkpoints, self._incarnation)
            if self._folder.is_divided:
                progress = {"step": step, "num_ended": await self._ledger.ask(questions.num_ended)}
                await asyncio.to_thread(replace_private, self._folder.progress, orjson.dumps(progress).decode())
        except OSError as error:
            logger.warning("step %d is not noted in %s, and training goes on: %s", step, self._folder.shared, error)

    async def saving(self, step: int) -> None:
        """Make a snapshot for the checkpoint of `step`. Raises LedgerError when it cannot be written."""
        if self._folder.is_divided:
            await asyncio.to_thread(self._save, step)

    def _save(self, step: int) -> None:
        self._snapshots.add(step)
        kept = self._folder.shared / self._folder.metrics.name
        shutil.copyfile(self._folder.metrics, part := kept.with_suffix(".part"))
        part.replace(kept)


def restore(folder: RunFolder) -> str:
    """Make the run's own folder from what it shared; return what is lost, for people. Blocks.

    Raises LedgerError when there is no snapshot, ConfigError when the folder cannot be made.
    """
    half = RunFolder(folder.path.with_name(f".{folder.path.name}-restoring"), folder.shared)
    shutil.rmtree(half.path, ignore_errors=True)
    half.make()
    for file in (half.config, half.metrics):
        if (kept := folder.shared / file.name).exists():
            shutil.copyfile(kept, file)
    step = restore_ledger(folder.snapshots, half.ledger, claimed=newest_claim(folder.checkpoints))
    with reading(half.ledger) as snapshot:
        num_ended = questions.num_ended(snapshot)
    half.path.rename(folder.path)
    return f"{folder.path} is restored from the ledger's snapshot of step {step}: {_lost(folder, step, num_ended)}"


def _lost(folder: RunFolder, step: int, num_ended: int) -> str:
    """Say what is known to have been done after the snapshot of `step`."""
    try:
        progress = orjson.loads(folder.progress.read_bytes())
        num_lost, newest = progress["num_ended"] - num_ended, progress["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return "how many rollouts that ended after it are lost is not known"
    return (
        f"at least {max(num_lost, 0)} rollouts that ended after it are lost, and {max(newest - step, 0)} train steps, "
        "which are made again"
    )
