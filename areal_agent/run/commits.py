"""How a train step becomes final, and where a run goes on after a crash: the checkpoint first, then the ledger.

    lease ─▶ train ─▶ push ─▶ checkpoint published, with what was leased for it ─▶ committed in the ledger
    start ─▶ folder recovered ─▶ the newest checkpoint that the ledger knows ─▶ a new incarnation, later leases returned

A run and the test that kills one at each commit point share it. It knows no process, no weights and no torch.
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
    """Where one process of a run goes on."""

    checkpoint: Checkpoint | None  # None: at the model that the run began with
    version: WeightVersion

    @property
    def run_state(self) -> JsonObject:
        """What the run had given the checkpoint to keep."""
        return self.checkpoint.run_state() if self.checkpoint else {}


async def begin(ledger: Ledger, directory: Path, passing: Passing = pass_by) -> Beginning:
    """Find the checkpoint to go on from, and begin an incarnation there. The ledger's lock is held by the caller.

    What the checkpoint holds is trained, also when the crash came before the ledger heard of it; later leases wait
    again.
    """
    await asyncio.to_thread(recover, directory)
    passing(CommitPoint.RECOVERED)
    checkpoint = await _living(ledger, directory)
    step = checkpoint.step if checkpoint else 0
    incarnation = await ledger.begin_incarnation(step)
    passing(CommitPoint.RESTARTED)
    return Beginning(checkpoint=checkpoint, version=WeightVersion(incarnation=incarnation.number, step=step))


async def leases_of(ledger: Ledger, step: int) -> dict[str, Any]:
    """What the checkpoint of `step` keeps of the ledger: which sessions were leased since the checkpoint before."""
    after = await ledger.ask(questions.last_checkpoint, before=step)
    return {LEASED_AFTER: after, LEASES: await ledger.ask(questions.leases, after, step)}


async def commit(ledger: Ledger, step: int, checkpoint: Path, passing: Passing = pass_by) -> None:
    """The checkpoint is published: what was leased up to its step is trained."""
    await ledger.commit_checkpoint(step, str(checkpoint))
    passing(CommitPoint.COMMITTED)


async def _living(ledger: Ledger, directory: Path) -> Checkpoint | None:
    """The newest intact checkpoint of the lineage that lives: its leases are those of the ledger."""
    checkpoints = intact_checkpoints(directory)
    while (checkpoint := await asyncio.to_thread(next, checkpoints, None)) is not None:
        state = checkpoint.run_state()
        if LEASES not in state:  # whoever leases is elsewhere
            return checkpoint
        known = await ledger.ask(questions.leases, state[LEASED_AFTER], checkpoint.step)
        if known == state[LEASES]:
            return checkpoint
        logger.warning(
            "passing over the checkpoint %s: what it was trained on is not what the ledger has for its steps; it is of "
            "a lineage that was given up, or of another run",
            checkpoint.path,
        )
    return None
