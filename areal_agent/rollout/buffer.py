"""Groups from admission until they are trained, and the staleness bound at consumption. It knows no loop and no I/O.

A trajectory whose staleness (`staleness.py`) is more than `max_staleness` is not used.

    start ─▶ running ─finish─▶ ready ──take──▶ (leased)
                                 └──take_stale──▶ (dropped)
"""

from dataclasses import dataclass

from areal_agent.staleness import is_stale, oldest_step
from areal_agent.types import Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGroup:
    """A finished group with at least one trajectory that can be trained.

    `trainable` are those trajectories; `size` counts the answers that were admitted, failed ones included.
    """

    group: TrajectoryGroup
    trainable: tuple[Trajectory, ...]
    size: int

    @property
    def oldest(self) -> int:
        """The step of the oldest sampled token in the group: older groups are consumed first."""
        return min(oldest_step(one) for one in self.trainable)

    @property
    def least_stale(self) -> int:
        """The oldest token of its freshest trajectory: when that is beyond the bound, the whole group is."""
        return max(oldest_step(one) for one in self.trainable)


class Buffer:
    """Running groups with the version at which they started, and finished ones, oldest first."""

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._running: dict[str, int] = {}
        self._ready: list[ReadyGroup] = []

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, group_id: str, step: int) -> None:
        self._running[group_id] = step

    def abandon(self, group_id: str) -> None:
        """A running group ended with nothing to train."""
        self._running.pop(group_id, None)

    def finish(self, ready: ReadyGroup) -> None:
        self._running.pop(ready.group.group_id, None)
        self._ready.append(ready)
        self._ready.sort(key=lambda one: (one.oldest, one.group.group_id))

    def stragglers(self, step: int) -> tuple[str, ...]:
        """Running groups that would be too stale after train step `step`: it is the last one that may use them."""
        return tuple(group_id for group_id, start in self._running.items() if step - start > self._max_staleness)

    def is_stale(self, oldest: int, step: int) -> bool:
        """Whether a token of version `oldest` is beyond the bound in train step `step`."""
        return is_stale(oldest, step, self._max_staleness)

    def take_stale(self, step: int) -> tuple[ReadyGroup, ...]:
        """Remove and return the groups of which every trajectory is beyond the bound for train step `step`."""
        stale = tuple(ready for ready in self._ready if self.is_stale(ready.least_stale, step))
        self._ready = [ready for ready in self._ready if ready not in stale]
        return stale

    def take(self, num_groups: int) -> tuple[ReadyGroup, ...]:
        """Remove and return the oldest `num_groups` groups; there must be as many."""
        if num_groups > len(self._ready):
            raise ValueError(f"{num_groups} groups asked for, {len(self._ready)} are ready")
        taken, self._ready = tuple(self._ready[:num_groups]), self._ready[num_groups:]
        return taken
