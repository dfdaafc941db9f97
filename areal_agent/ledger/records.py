"""What the ledger says of itself: the start of a process of the run, and the counts of its trajectories."""

from collections.abc import Mapping
from dataclasses import dataclass

STATUS_NOTE = "status"
"""The note that says how far the run is: `running`, `interrupted`, `failed`, `completed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incarnation:
    """One process of a run, from its start to its end or crash: 0 for the first, one more for each restart.

    >>> Incarnation(number=1, num_orphans=3, num_returned=16).number
    1
    """

    number: int
    num_orphans: int  # sessions that the process before left open
    num_returned: int  # trajectories of steps that no checkpoint holds: they wait again


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """How many trajectories there are, by how they ended and by what became of them.

    Of the trajectories for training, each is exactly one of waiting, leased, trained or dropped.
    """

    num_open: int  # sessions that have not ended
    statuses: Mapping[str, int]  # closed sessions by `Status`, those for evaluation included
    num_eval: int
    num_waiting: int
    num_leased: int
    num_trained: int
    drops: Mapping[str, int]  # by `Drop`

    @property
    def num_closed(self) -> int:
        return sum(self.statuses.values())

    @property
    def num_dropped(self) -> int:
        return sum(self.drops.values())
