"""The moments at which a crash may fall while a train step becomes final, by name. It knows no file and no ledger.

    LEASED ─▶ TRAINED ─▶ PUSHED ─▶ ... ─▶ WRITTEN ─▶ DURABLE ─▶ (ASIDE) ─▶ PUBLISHED ─▶ PRUNED ─▶ COMMITTED
    then, in the next process: RECOVERED ─▶ RESTARTED

Whoever passes one says so to a `Passing`. In a run nobody listens; the test that kills a trainer at each of them does.
"""

from collections.abc import Callable
from enum import StrEnum


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
