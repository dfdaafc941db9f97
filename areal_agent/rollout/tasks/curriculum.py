"""Which tasks are worth their rollouts: estimates of their success rates. It knows no stream and no group.

A task whose estimate lies outside a band of success rates teaches little: it is passed over, but for a share of the
times that it comes, so that the estimate can change. Whether it is depends on the seed, the position in the stream and
the estimate alone. A task that was never seen is drawn.

An estimate moves towards what a group showed by the mean of all groups at first, and by `FORGETTING` later on, because
the policy changes. It learns of a group when that leaves the buffer, into a batch or because it is flat: so the state
of a checkpoint holds each group of the steps before it once, and a group that is trained again is new to it.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from areal_agent.errors import ConfigError
from areal_agent.rollout.tasks.config import CurriculumConfig
from areal_agent.rollout.tasks.permutation import fraction
from areal_agent.types import JsonObject, Task

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
        """With one more group, of which a share `success` succeeded."""
        num_groups = self.num_groups + 1
        weight = max(1.0 / num_groups, FORGETTING)
        return Estimate(rate=self.rate + weight * (success - self.rate), num_groups=num_groups)


class Curriculum:
    """Estimates by task, or by what tasks share. Raises ConfigError when a task lacks the key that they share."""

    def __init__(self, config: CurriculumConfig, tasks: Iterable[Task], *, seed: int, success_reward: float) -> None:
        self._config = config
        self._success_reward = success_reward
        self._seed = seed
        self._keys: Mapping[str, str] = {task.id: _key_of(task, config.by) for task in tasks}
        self._estimates: dict[str, Estimate] = {}

    def estimate(self, task_id: str) -> Estimate:
        return self._estimates.get(self._keys[task_id], Estimate())

    def draws(self, task: Task, position: int) -> bool:
        """Whether the task is drawn at this position of the stream; else it is passed over."""
        estimate = self.estimate(task.id)
        is_inside = self._config.low <= estimate.rate <= self._config.high
        if estimate.num_groups == 0 or is_inside:
            return True
        return fraction(f"curriculum/{self._seed}/{position}") < self._config.outside

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """What a group earned, at least one rollout. A task that is not in the run's sources teaches nothing."""
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
