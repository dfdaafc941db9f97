"""Commits of train steps, and the point where a run goes on after a crash: the checkpoint first, then the ledger.

    lease ─▶ train ─▶ push ─▶ checkpoint published, with the leases behind it ─▶ committed in the ledger
    start ─▶ folder recovered ─▶ the newest checkpoint that the ledger knows ─▶ a new incarnation, later leases returned

A run uses these functions, and so does the test that kills a run at each commit point.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.trainer.checkpoint import Checkpoint, CommitPoint, Passing, intact_checkpoints, pass_by, recover
from areal_agent.types import JsonObject, WeightVersion

logger = logging.getLogger(__name__)


LEASES = "leases"
LEASED_AFTER = "leased_after"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """The checkpoint and version at which one process of a run begins."""

    checkpoint: Checkpoint | None  # None: begin with the initial model
    version: WeightVersion

    @property
    def run_state(self) -> JsonObject:
        """The state that the run had given the checkpoint to keep."""
        return self.checkpoint.run_state() if self.checkpoint else {}


async def begin(ledger: Ledger, directory: Path, passing: Passing = pass_by) -> Beginning:
    """Find the checkpoint to go on from, and begin an incarnation there. The caller holds the ledger's lock.

    Leases in the checkpoint are trained, even when the crash came before the ledger was told; later leases wait again.
    """
    await asyncio.to_thread(recover, directory)
    passing(CommitPoint.RECOVERED)
    checkpoint = await _living(ledger, directory)
    step = checkpoint.step if checkpoint else 0
    incarnation = await ledger.begin_incarnation(step)
    passing(CommitPoint.RESTARTED)
    return Beginning(checkpoint=checkpoint, version=WeightVersion(incarnation=incarnation.number, step=step))


async def leases_of(ledger: Ledger, step: int) -> dict[str, Any]:
    """Return what the checkpoint of `step` keeps of the ledger: the sessions leased since the checkpoint before."""
    after = await ledger.ask(questions.last_checkpoint, before=step)
    return {LEASED_AFTER: after, LEASES: await ledger.ask(questions.leases, after, step)}


async def commit(ledger: Ledger, step: int, checkpoint: Path, passing: Passing = pass_by) -> None:
    """Tell the ledger that the checkpoint is published: everything leased up to its step is trained."""
    await ledger.commit_checkpoint(step, str(checkpoint))
    passing(CommitPoint.COMMITTED)


async def _living(ledger: Ledger, directory: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint of the current lineage: the one whose leases agree with the ledger's."""
    checkpoints = intact_checkpoints(directory)
    while (checkpoint := await asyncio.to_thread(next, checkpoints, None)) is not None:
        state = checkpoint.run_state()
        if LEASES not in state:  # the ledger with the leases is a gateway's elsewhere
            return checkpoint
        known = await ledger.ask(questions.leases, state[LEASED_AFTER], checkpoint.step)
        if known == state[LEASES]:
            return checkpoint
        logger.warning(
            "passing over the checkpoint %s: its leases are not those of the ledger for its steps, so it is of an "
            "abandoned lineage or of another run",
            checkpoint.path,
        )
    return None
