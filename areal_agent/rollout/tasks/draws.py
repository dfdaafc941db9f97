"""Which task is rolled out next, over restarts, and the curriculum that passes over tasks that teach little.

    position   0 1 2 3 4 5 6 ...
               t t w r w ─ ─              t trained, w waits to be, r was running when the process died
    next       3, then 5, 6, ...          after the restart: first what was cut off, then what was never drawn

The ledger is the cursor: a group's id has its position, and a session is there before its first token. So nothing is
lost or doubled between two checkpoints: finished groups are restored and trained, cut-off ones are drawn again under a
new id, and each task is settled once per epoch (trained, or dropped as failed, flat or stale), however often the run is
killed. A position without a group was passed over when there is a curriculum; otherwise its process died before the
group's first session.

The curriculum estimates success rates. A task whose estimate lies outside a band is passed over, except for a share of
the times it comes, so that the estimate can change; this depends only on the seed, the position and the estimate.
Unseen tasks are drawn. At first an estimate is the mean of all groups; later a new group weighs `FORGETTING`, because
the policy changes. It learns of a group when that leaves the buffer, into a batch or because it is flat: so the state
in a checkpoint holds each group of the steps before it once, and a group that is trained again is new to it.
"""

import logging
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.tasks.config import CurriculumConfig
from areal_agent.rollout.tasks.stream import TaskStream, fraction
from areal_agent.types import JsonObject, Task

logger = logging.getLogger(__name__)


FORGETTING = 0.3
"""The least weight of a new group in an estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A running success rate over `num_groups` groups.

    >>> Estimate(rate=1.0, num_groups=1).after(0.0)
    Estimate(rate=0.5, num_groups=2)
    """

    rate: float = 0.0
    num_groups: int = 0

    def after(self, success: float) -> "Estimate":
        """Return the estimate with one more group, of which a share `success` succeeded."""
        num_groups = self.num_groups + 1
        weight = max(1.0 / num_groups, FORGETTING)
        return Estimate(rate=self.rate + weight * (success - self.rate), num_groups=num_groups)


class Curriculum:
    """Estimates of success rates, by task or by a shared key. Raises ConfigError when a task lacks that key."""

    def __init__(self, config: CurriculumConfig, tasks: Iterable[Task], *, seed: int, success_reward: float) -> None:
        self._config = config
        self._success_reward = success_reward
        self._seed = seed
        self._keys: Mapping[str, str] = {task.id: _key_of(task, config.by) for task in tasks}
        self._estimates: dict[str, Estimate] = {}

    def estimate(self, task_id: str) -> Estimate:
        return self._estimates.get(self._keys[task_id], Estimate())

    def draws(self, task: Task, position: int) -> bool:
        """Return whether the task is drawn at this position of the stream; otherwise it is passed over."""
        estimate = self.estimate(task.id)
        is_inside = self._config.low <= estimate.rate <= self._config.high
        if estimate.num_groups == 0 or is_inside:
            return True
        return fraction(f"curriculum/{self._seed}/{position}") < self._config.outside

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Learn from the rewards of a group, at least one. Tasks outside the run's sources are ignored."""
        key = self._keys.get(task_id)
        if key is not None:
            success = statistics.fmean(reward >= self._success_reward for reward in rewards)
            self._estimates[key] = self._estimates.get(key, Estimate()).after(success)

    def state(self) -> JsonObject:
        return {key: [estimate.rate, estimate.num_groups] for key, estimate in self._estimates.items()}

    def restore(self, state: JsonObject) -> None:
        pairs = cast(Mapping[str, tuple[float, int]], state)
        self._estimates = {key: Estimate(rate=rate, num_groups=number) for key, (rate, number) in pairs.items()}


def _key_of(task: Task, by: str | None) -> str:
    if by is None:
        return task.id
    data: Mapping[str, Any] = task.data
    if by not in data:
        raise ConfigError(
            f"tasks.curriculum.by is {by!r}, but the data of task {task.id!r} has no such key; it has {', '.join(data)}"
        )
    return str(data[by])


DRAWN = re.compile(r"g(\d{6,})(?:r(\d+))?")
GIVEN = re.compile(r"t(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A task to roll out, and the id of its group."""

    group_id: str
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The `number`-th time, from 0, that the group of a position is started.

    >>> Attempt(position=12, number=0).group_id, Attempt(position=12, number=1).group_id
    ('g000012', 'g000012r1')
    """

    position: int
    number: int = 0

    @property
    def group_id(self) -> str:
        return f"g{self.position:06d}" + (f"r{self.number}" if self.number else "")

    @classmethod
    def parse(cls, group_id: str) -> Self | None:
        """Read a group id; None for the group of a task that was not drawn."""
        found = DRAWN.fullmatch(group_id)
        return None if found is None else cls(position=int(found[1]), number=int(found[2] or 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """The draws of earlier processes of the run.

    >>> Past.of({"g000000": False, "g000002": True}, since=0).again
    (Attempt(position=1, number=0), Attempt(position=2, number=1))
    """

    since: int = 0  # the position at which the stream of these tasks begins
    next_position: int = 0
    again: tuple[Attempt, ...] = ()  # cut off, or never begun: to be drawn again
    num_given: int = 0

    @classmethod
    def of(cls, groups: Mapping[str, bool], since: int, *, skips_gaps: bool = False) -> Self:
        """Read the ledger's groups, each with whether it was cut off. Positions before `since` are not drawn again."""
        attempts = [attempt for group_id in groups if (attempt := Attempt.parse(group_id)) is not None]
        latest = {one.position: one for one in sorted(attempts, key=lambda one: (one.position, one.number))}
        next_position = max(latest, default=-1) + 1
        again: list[Attempt] = []
        for position in range(since, next_position):
            attempt = latest.get(position)
            if attempt is not None and groups[attempt.group_id]:
                again.append(Attempt(position=position, number=attempt.number + 1))
            elif attempt is None and not skips_gaps:
                again.append(Attempt(position=position))
        given = [int(found[1]) for group_id in groups if (found := GIVEN.fullmatch(group_id)) is not None]
        return cls(
            since=since,
            next_position=max(since, next_position),
            again=tuple(again),
            num_given=max(given, default=-1) + 1,
        )


class Draws:
    """The draws of one process of a run."""

    def __init__(self, stream: TaskStream, *, curriculum: Curriculum | None = None, past: Past | None = None) -> None:
        past = past or Past()
        self.num_passed_over = 0
        self._stream = stream
        self._curriculum = curriculum
        self._since = past.since
        self._again = deque(past.again)
        self._next_position = past.next_position
        self._num_given = past.num_given

    def draw(self) -> Draw:
        """Return the next task; groups that were cut off come first."""
        while True:
            attempt = self._again.popleft() if self._again else Attempt(position=self._advance())
            task = self._stream.at(attempt.position - self._since)
            if attempt.number > 0 or self._curriculum is None or self._curriculum.draws(task, attempt.position):
                return Draw(group_id=attempt.group_id, task=task)
            self.num_passed_over += 1

    def give(self, task: Task) -> Draw:
        """Return a draw for a task of the caller's own, outside the stream."""
        number, self._num_given = self._num_given, self._num_given + 1
        return Draw(group_id=f"t{number:06d}", task=task)

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Learn from the rewards of a group that leaves the buffer."""
        if self._curriculum is not None:
            self._curriculum.learn(task_id, rewards)

    def state(self) -> JsonObject:
        """Return the state for a checkpoint."""
        return {} if self._curriculum is None else {"curriculum": self._curriculum.state()}

    def restore(self, state: JsonObject) -> None:
        """Restore the state from a checkpoint; that of a run without a curriculum is empty."""
        if self._curriculum is not None:
            self._curriculum.restore(state.get("curriculum", {}))

    def _advance(self) -> int:
        position, self._next_position = self._next_position, self._next_position + 1
        return position


TASKS_NOTE = "tasks"
"""The note in the ledger on the tasks of its groups: the stream's fingerprint, and the position where it begins."""


async def open_draws(stream: TaskStream, curriculum: Curriculum | None, ledger: Ledger) -> Draws:
    """Go on where the ledger's groups end. When the tasks have changed, a new stream begins there."""
    groups = await ledger.ask(questions.drawn_groups)
    skips_gaps = curriculum is not None
    note: Mapping[str, Any] | None = await ledger.ask(questions.note, TASKS_NOTE)
    since = note["since"] if note else 0
    if note and note["fingerprint"] != stream.fingerprint():
        since = Past.of(groups, 0).next_position
        logger.warning(
            "the tasks, their order or their weights are not those that this run began with: the new ones are drawn "
            "from now on, and groups of the old ones that were cut off are not drawn again"
        )
    await ledger.set_note(TASKS_NOTE, {"fingerprint": stream.fingerprint(), "since": since})
    return Draws(stream, curriculum=curriculum, past=Past.of(groups, since, skips_gaps=skips_gaps))
