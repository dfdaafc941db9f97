"""From rows to tasks: columns are named, a filter chooses, and every task has an id of its own. It opens no source."""

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from pydantic_core import from_json, to_json

from areal_agent.errors import ConfigError
from areal_agent.rollout.tasks.config import SourceConfig, TasksConfig
from areal_agent.rollout.tasks.imports import import_object, one_line
from areal_agent.rollout.tasks.rows import Row, Split, open_rows
from areal_agent.rollout.tasks.task_set import TaskSet, TaskSource
from areal_agent.types import JsonObject, Task


def load_tasks(config: TasksConfig, split: Split, seed: int, what: str = "tasks") -> TaskSet:
    """All tasks of all sources, at least one of each. Raises ConfigError for a source that cannot be used."""
    is_mixed = len(config.sources) > 1
    return TaskSet(
        sources=tuple(
            TaskSource(
                name=source.label if is_mixed else "",
                weight=source.weight,
                tasks=_load_source(source, split, seed, what, f"{source.label}/" if is_mixed else ""),
            )
            for source in config.sources
        )
    )


def _load_source(config: SourceConfig, split: Split, seed: int, what: str, id_prefix: str) -> tuple[Task, ...]:
    keeps = _load_filter(config, what)
    tasks: list[Task] = []
    places: dict[str, str] = {}
    num_rows = 0
    for row in open_rows(config, split, seed, what):
        task = _as_task(row, num_rows, config.columns, id_prefix, what)
        num_rows += 1
        if keeps(row, task.data):
            if task.id in places:
                raise ConfigError(
                    f"{what}: the id {task.id!r} is given twice: {places[task.id]}, and {row.place}; "
                    "each task needs one of its own (or none: then it is its number)"
                )
            places[task.id] = row.place
            tasks.append(task)
    if not tasks:
        reason = f"the filter {config.filter!r} keeps none of its {num_rows} tasks" if num_rows else "it is empty"
        raise ConfigError(f"{what}: {config.source!r} has no task for split {config.split or split!r}: {reason}")
    return tuple(tasks)


def _as_task(row: Row, index: int, columns: Mapping[str, str], id_prefix: str, what: str) -> Task:
    if isinstance(row.item, Task):
        task = row.item
        return Task(id=id_prefix + task.id, data=_rename(task.data, columns, row, what), metadata=task.metadata)
    if not isinstance(row.item, Mapping):
        raise ConfigError(f"{what}: {row.place} is a {type(row.item).__name__}, expected an object (a dict), or a Task")
    data = _rename(cast(JsonObject, row.item), columns, row, what)
    given = data.get("id")
    return Task(id=id_prefix + str(index if given is None else given), data=data)


def _rename(data: JsonObject, columns: Mapping[str, str], row: Row, what: str) -> JsonObject:
    if not columns:
        return data
    missing = next((column for column in columns.values() if column not in data), None)
    if missing is not None:
        raise ConfigError(
            f"{what}.columns: {row.place} has no column {missing!r}; it has {', '.join(map(str, data)) or 'none'}"
        )
    return {name: data[column] for name, column in columns.items()}


def _load_filter(config: SourceConfig, what: str) -> Callable[[Row, JsonObject], bool]:
    if config.filter is None:
        return lambda row, data: True
    predicate = import_object(config.filter, f"{what}.filter")
    if not callable(predicate):
        raise ConfigError(f"{what}.filter: {config.filter!r} is a {type(predicate).__name__}, not a function(data)")

    def keeps(row: Row, data: JsonObject) -> bool:
        try:
            return bool(predicate(data))
        except Exception as error:  # a function of the user's may fail in any way
            raise ConfigError(f"{what}.filter: {config.filter} failed at {row.place}: {one_line(error)}") from error

    return keeps


def require_json(tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a task that would reach another process changed: rollout workers get it as JSON."""
    for task in tasks:
        try:
            # as the messages to workers are written: integers keep all their digits, infinity becomes null
            is_kept = all(from_json(to_json(one, inf_nan_mode="null")) == one for one in (task.data, task.metadata))
        except ValueError:
            is_kept = False
        if not is_kept:
            raise ConfigError(
                f"tasks: task {task.id!r} holds what JSON does not keep ({task.data!r:.200}), and rollout.workers > 0 "
                "sends tasks as JSON; use dicts with text keys, lists, text, finite numbers, true, false and None"
            )
