"""Where tasks come from: a function of the user's, or a JSONL file. It knows nothing of rollouts."""

import importlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from areal_agent.errors import ConfigError
from areal_agent.rollout.config import TasksConfig
from areal_agent.types import Task

Split = Literal["train", "test"]
MAX_TASKS = 1_000_000  # how much of an endless source is held in memory


def import_object(path: str, what: str) -> Any:
    """Import `package.module:name`; raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{what}: {path!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's may fail in any way at import
        raise ConfigError(
            f"{what}: importing {module_name!r} failed: {one_line(error)}; "
            "check the name and that it can be imported from this folder"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{what}: module {module_name!r} has no {name!r}") from None


def one_line(error: BaseException) -> str:
    """`ValueError: text`, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def load_tasks(config: TasksConfig, split: Split, seed: int, what: str = "tasks") -> tuple[Task, ...]:
    """All tasks of a source, at least one. Raises ConfigError for a source that cannot be used."""
    is_file = config.source.endswith(".jsonl")
    items = _from_file(Path(config.source), what) if is_file else _from_function(config, split, seed, what)
    tasks = tuple(_as_task(item, index, what) for index, item in enumerate(islice(items, MAX_TASKS)))
    if not tasks:
        raise ConfigError(f"{what}: {config.source!r} has no task for split {split!r}")
    return tasks


def _from_function(config: TasksConfig, split: Split, seed: int, what: str) -> Iterable[object]:
    function = import_object(config.source, what)
    if not callable(function):
        raise ConfigError(f"{what}: {config.source!r} is a {type(function).__name__}, not a function(split, seed)")
    make = cast(Callable[..., Iterable[object]], function)
    try:
        return list(islice(make(split=split, seed=seed, **config.args), MAX_TASKS))
    except Exception as error:  # a function of the user's may fail in any way
        raise ConfigError(
            f"{what}: {config.source}(split={split!r}, seed={seed}, ...) failed: {one_line(error)}; see tasks.args"
        ) from error


def _from_file(path: Path, what: str) -> Iterable[object]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{what}: cannot read {str(path)!r}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise ConfigError(f"{what}: {path}:{number} is not JSON: {error}") from error


def _as_task(item: object, index: int, what: str) -> Task:
    if isinstance(item, Task):
        return item
    if not isinstance(item, Mapping):
        raise ConfigError(f"{what}: task {index} is a {type(item).__name__}, expected a dict or a Task")
    data = cast(Mapping[str, Any], item)
    return Task(id=str(data.get("id", index)), data=data)


def require_json(tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a task that would reach another process changed: rollout workers get it as JSON."""
    for task in tasks:
        try:
            is_kept = all(orjson.loads(orjson.dumps(one)) == one for one in (task.data, task.metadata))
        except (TypeError, orjson.JSONDecodeError):
            is_kept = False
        if not is_kept:
            raise ConfigError(
                f"tasks: task {task.id!r} holds what JSON does not keep ({task.data!r:.200}), and rollout.workers > 0 "
                "sends tasks as JSON; use dicts with text keys, lists, text, finite numbers, true, false and None"
            )


class TaskStream:
    """The tasks of training in order of use: each epoch a new shuffle by seed. The n-th task is a function of n.

    >>> stream = TaskStream([Task(id=str(i), data={}) for i in range(3)], seed=0)
    >>> sorted(stream.at(n).id for n in (3, 4, 5))
    ['0', '1', '2']
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, number: int) -> Task:
        epoch, offset = divmod(number, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[offset]]
