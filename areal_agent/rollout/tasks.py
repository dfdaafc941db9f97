"""From sources to tasks: the rows of files, functions and data sets; columns, a filter and ids make tasks of them.

`load_tasks` returns a `TaskSet`: the tasks of all sources of one split, with the sources' weights. Every row comes with
its place (a file and a line, say), which errors name.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import orjson
from pydantic_core import from_json, to_json

from areal_agent.errors import ConfigError
from areal_agent.rollout.config import SourceConfig, SourceKind, TasksConfig
from areal_agent.section import import_object, one_line
from areal_agent.types import JsonObject, Task

logger = logging.getLogger(__name__)


PARQUET_BATCH_ROWS = 4096
LONG_NUMBER = re.compile(rb"\d{19}")
"""Digits that may belong to an integer beyond 64 bits."""


def jsonl_rows(path: Path, what: str) -> Iterator[tuple[str, object]]:
    """Yield a JSON value per line, without blank lines. Raises ConfigError with the file and the line."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _value(line)
    except OSError as error:
        raise _unreadable(path, what, error.strerror or str(error)) from error
    except ValueError as error:  # of either parser; Python refuses integers of thousands of digits
        raise ConfigError(f"{what}: {path}:{number} is not JSON: {error}") from error


def parquet_rows(path: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a dict per row, read batch by batch. Raises ConfigError; needs the extra `parquet`."""
    try:
        # imported here: without such a file the extra is not needed
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: {str(path)!r} is a Parquet file, and the package {error.name!r} is missing; install the extra: "
            "pip install 'areal-agent[parquet]'"
        ) from error
    number = 0
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except OSError as error:
        raise _unreadable(path, what, error.strerror or str(error)) from error
    except pa.ArrowException as error:
        raise ConfigError(f"{what}: {str(path)!r} is not a Parquet file: {' '.join(str(error).split())}") from error


def _value(line: bytes) -> object:
    """Parse a line with all digits of its integers: orjson is strict and quick, but turns long ones into floats."""
    value: object = orjson.loads(line)
    return json.loads(line) if LONG_NUMBER.search(line) else value


def _unreadable(path: Path, what: str, reason: str) -> ConfigError:
    where = "" if path.is_absolute() else f" (looked for from {str(Path.cwd())!r})"
    return ConfigError(f"{what}: cannot read {str(path)!r}: {reason}{where}")


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


Split = Literal["train", "test"]

MAX_ITEMS = 1_000_000
"""The number of tasks taken from a function, whose iterable may be endless."""


class Row(NamedTuple):
    """An item of a source. `place` says where it stands: a file and a line, say."""

    place: str
    item: object


def open_rows(config: SourceConfig, split: Split, seed: int, what: str) -> Iterator[Row]:
    """Return all rows, read as they are asked for. `what` names the section in errors. Raises ConfigError."""
    match config.kind:
        case SourceKind.FUNCTION:
            rows = _function_rows(config, split, seed, what)
        case SourceKind.JSONL:
            rows = jsonl_rows(Path(config.source), what)
        case SourceKind.PARQUET:
            rows = parquet_rows(Path(config.source), what)
        case SourceKind.DATASET:
            rows = _dataset_rows(config, config.split or split, what)
    return (Row(place=place, item=item) for place, item in rows)


def _function_rows(config: SourceConfig, split: Split, seed: int, what: str) -> Iterator[tuple[str, object]]:
    function = import_object(config.source, what)
    if not callable(function):
        raise ConfigError(f"{what}: {config.source!r} is a {type(function).__name__}, not a function(split, seed)")
    make = cast(Callable[..., Iterable[object]], function)
    try:
        items = list(islice(make(split=split, seed=seed, **config.args), MAX_ITEMS + 1))
    except Exception as error:  # a user's function may fail in any way
        raise ConfigError(
            f"{what}: {config.source}(split={split!r}, seed={seed}, ...) failed: {one_line(error)}; see {what}.args"
        ) from error
    if len(items) > MAX_ITEMS:
        logger.warning("%s: %s gives more than %d tasks; the first are used", what, config.source, MAX_ITEMS)
    return ((f"item {index} of {config.source}", item) for index, item in enumerate(items[:MAX_ITEMS]))


def _dataset_rows(config: SourceConfig, split: str, what: str) -> Iterator[tuple[str, object]]:
    source, folder = config.source, Path(config.source)
    args = cast(Mapping[str, Any], config.args)
    if not folder.is_dir() and not HUB_NAME.fullmatch(source):
        raise ConfigError(
            f"{what}: {source!r} is not a source: there is no such folder, and it is neither a function "
            "(package.module:function), nor a .jsonl or .parquet file, nor a data set on the hub (org/name)"
        )
    try:
        # imported here: it takes two seconds, and without such a source the extra is not needed
        from datasets import DatasetDict, load_dataset, load_from_disk
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: {source!r} is a Hugging Face data set, and the package {error.name!r} is missing; install "
            "the extra: pip install 'areal-agent[datasets]'"
        ) from error
    is_saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))  # by `save_to_disk`
    try:
        loaded = load_from_disk(source, **args) if is_saved else load_dataset(source, split=split, **args)
    except Exception as error:  # a hub, a cache or a file format may fail in any way
        where = "" if folder.is_dir() else "there is no such folder, and "
        raise ConfigError(
            f"{what}: {where}loading the data set {source!r}, split {split!r}, failed: {one_line(error)}"
        ) from error
    if is_saved:
        # a data set saved without splits counts as `train`: nothing is evaluated on what is trained
        splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
        if split not in splits:
            raise ConfigError(f"{what}: {source!r} has no split {split!r}; give one of {', '.join(map(str, splits))}")
        loaded = splits[split]
    return ((f"{source} [{split}] row {number}", dict(row)) for number, row in enumerate(loaded))


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSource:
    """The tasks of one source, at least one, in its order."""

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
        """Make a set of one source."""
        return cls(sources=(TaskSource(name="", weight=1.0, tasks=tuple(tasks)),))

    def __len__(self) -> int:
        return sum(len(source.tasks) for source in self.sources)

    def __iter__(self) -> Iterator[Task]:
        for source in self.sources:
            yield from source.tasks

    def source_names(self) -> dict[str, str]:
        """Return the source of each task by task id; empty when there is only one source, which has no name."""
        return {task.id: source.name for source in self.sources if source.name for task in source.tasks}

    def fingerprint(self) -> str:
        """Return a hash that changes when task ids, their order or weights do. The tasks' data do not count."""
        digest = hashlib.sha256()
        for source in self.sources:
            digest.update(repr((source.name, source.weight, len(source.tasks))).encode())
            for task in source.tasks:
                digest.update(f"{len(task.id)}:{task.id}".encode(errors="surrogatepass"))
        return digest.hexdigest()


def load_tasks(config: TasksConfig, split: Split, seed: int, what: str = "tasks") -> TaskSet:
    """Return all tasks of all sources, at least one of each. Raises ConfigError for a source that cannot be used."""
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
                    "give each task an id of its own, or none: its id is then its number"
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
        except Exception as error:  # a user's function may fail in any way
            raise ConfigError(f"{what}.filter: {config.filter} failed at {row.place}: {one_line(error)}") from error

    return keeps


def require_json(tasks: Iterable[Task]) -> None:
    """Raise ConfigError for a task that JSON would change: rollout workers receive tasks as JSON."""
    for task in tasks:
        try:
            # like the messages to workers: integers keep all their digits, infinity becomes null
            is_kept = all(from_json(to_json(one, inf_nan_mode="null")) == one for one in (task.data, task.metadata))
        except ValueError:
            is_kept = False
        if not is_kept:
            raise ConfigError(
                f"tasks: task {task.id!r} holds data that JSON does not preserve ({task.data!r:.200}), and "
                "rollout.workers > 0 sends tasks as JSON; use dicts with text keys, lists, text, finite numbers, "
                "true, false and None"
            )
