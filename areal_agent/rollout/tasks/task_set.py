"""The tasks of all sources of one split, with their weights. It knows not where they came from, nor their order."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from areal_agent.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSource:
    """Tasks of one source, at least one, in its order."""

    name: str
    weight: float
    tasks: tuple[Task, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSet:
    """All tasks of a run. No two have the same id.

    >>> tasks = TaskSet.of([Task(id="a", data={}), Task(id="b", data={})])
    >>> len(tasks), [task.id for task in tasks]
    (2, ['a', 'b'])
    """

    sources: tuple[TaskSource, ...]

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Self:
        """Of one source."""
        return cls(sources=(TaskSource(name="", weight=1.0, tasks=tuple(tasks)),))

    def __len__(self) -> int:
        return sum(len(source.tasks) for source in self.sources)

    def __iter__(self) -> Iterator[Task]:
        for source in self.sources:
            yield from source.tasks

    def source_names(self) -> dict[str, str]:
        """The source of each task, by its id; empty where there is one source alone, which has no name."""
        return {task.id: source.name for source in self.sources if source.name for task in source.tasks}

    def fingerprint(self) -> str:
        """Changes when tasks, their order or their weights do: by their ids, not by what they hold."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(repr((source.name, source.weight, len(source.tasks))).encode())
            for task in source.tasks:
                digest.update(f"{len(task.id)}:{task.id}".encode(errors="surrogatepass"))
        return digest.hexdigest()
