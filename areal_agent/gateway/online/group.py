"""The sibling sessions of one task, as the trainer's side of a gateway sees them. Pure: no clock, no ledger."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A session that has ended and could be trained: the version of its oldest token, and whether it was rewarded."""

    session_id: str
    oldest: int
    has_reward: bool


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

    @property
    def oldest(self) -> int:
        return min(one.oldest for one in self.waiting.values())

    @property
    def lacks_nothing(self) -> bool:
        """It is over, and those that can be trained have a reward."""
        return self.is_over and all(one.has_reward for one in self.waiting.values())
