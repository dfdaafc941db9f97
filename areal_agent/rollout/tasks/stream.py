"""The order in which tasks are used: the n-th is a function of n. It keeps nothing, and knows not which come next."""

from areal_agent.errors import ConfigError
from areal_agent.rollout.tasks.mixture import Mixture
from areal_agent.rollout.tasks.permutation import permuted
from areal_agent.rollout.tasks.task_set import TaskSet
from areal_agent.types import Task


class TaskStream:
    """Endless: each source has epochs of its own, in each of which every task of it comes once.

    >>> stream = TaskStream(TaskSet.of([Task(id=str(i), data={}) for i in range(3)]), seed=0)
    >>> sorted(stream.at(position).id for position in (3, 4, 5))
    ['0', '1', '2']
    """

    def __init__(self, tasks: TaskSet, *, seed: int, shuffle: bool = True) -> None:
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self._mixture = Mixture([source.weight for source in tasks.sources])

    def at(self, position: int) -> Task:
        place = self._mixture.place(position)
        source = self.tasks.sources[place.source]
        epoch, offset = divmod(place.number, len(source.tasks))
        if self.shuffle:
            offset = permuted(offset, len(source.tasks), f"{self.seed}/{source.name}/{epoch}")
        return source.tasks[offset]

    def fingerprint(self) -> str:
        """Changes when the task of a position may have changed."""
        return f"{self.tasks.fingerprint()}/{self.seed if self.shuffle else 'in order'}"


def in_order(tasks: TaskSet, wanted: int, key: str) -> tuple[Task, ...]:
    """The first tasks, of each source its share. Raises ConfigError, naming `key`, when there are too few."""
    stream = TaskStream(tasks, seed=0, shuffle=False)
    first = tuple(stream.at(position) for position in range(wanted))
    num_different = len({task.id for task in first})
    if num_different < wanted:
        shares = "" if len(tasks.sources) == 1 else ", each source in proportion to its weight"
        raise ConfigError(
            f"{key} is {wanted}, but there are {num_different} held-out tasks for that{shares}; give at most as many"
        )
    return first
