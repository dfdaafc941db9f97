"""The sibling sessions of one task, as the trainer's side of a gateway sees them. Pure: no clock, no ledger."""

from dataclasses import dataclass, field

from areal_agent.gateway.online.labels import Labels
from areal_agent.types import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A session that has ended and could be trained: the weights that sampled it, and whether it was rewarded."""

    session_id: str
    versions: frozenset[WeightVersion]
    has_reward: bool

    def oldest(self, labels: Labels) -> int:
        """The step of its oldest token, as the trainer counts."""
        return min(map(labels.step_of, self.versions))

    def newest(self, labels: Labels) -> int:
        return max(map(labels.step_of, self.versions))


@dataclass(kw_only=True, slots=True)
class Group:
    """The sibling sessions of one task. `size` answers are reserved for it, failed ones included."""

    id: str
    size: int
    started_step: int  # the version that served when it was admitted
    changed_s: float  # when the last thing happened to it
    sessions: list[str] = field(default_factory=list[str])  # that have started
    running: set[str] = field(default_factory=set[str])
    waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])

    @property
    def num_started(self) -> int:
        return len(self.sessions)

    @property
    def is_over(self) -> bool:
        """All siblings have started and ended."""
        return not self.running and self.num_started == self.size

    def oldest(self, labels: Labels) -> int:
        return min(one.oldest(labels) for one in self.waiting.values())

    @property
    def lacks_nothing(self) -> bool:
        """It is over, and those that can be trained have a reward."""
        return self.is_over and all(one.has_reward for one in self.waiting.values())
