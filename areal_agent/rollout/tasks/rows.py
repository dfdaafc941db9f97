"""The rows of a source, each with its place for whoever complains of it. It knows nothing of what makes a task."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, cast

from areal_agent.errors import ConfigError
from areal_agent.rollout.tasks.config import SourceConfig, SourceKind
from areal_agent.rollout.tasks.files import jsonl_rows, parquet_rows
from areal_agent.rollout.tasks.imports import import_object, one_line

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

logger = logging.getLogger(__name__)

Split = Literal["train", "test"]

MAX_ITEMS = 1_000_000
"""How much of what a function gives is held in memory: it may be endless."""


class Row(NamedTuple):
    """`place` says where it stands: a file and a line, say."""

    place: str
    item: object


def open_rows(config: SourceConfig, split: Split, seed: int, what: str) -> Iterator[Row]:
    """All rows, read as they are asked for. `what` names the section in complaints. Raises ConfigError."""
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
    except Exception as error:  # a function of the user's may fail in any way
        raise ConfigError(
            f"{what}: {config.source}(split={split!r}, seed={seed}, ...) failed: {one_line(error)}; see {what}.args"
        ) from error
    if len(items) > MAX_ITEMS:
        logger.warning("%s: %s gives more than %d tasks; the first are used", what, config.source, MAX_ITEMS)
    return ((f"item {index} of {config.source}", item) for index, item in enumerate(items[:MAX_ITEMS]))


def _dataset_rows(config: SourceConfig, split: str, what: str) -> Iterator[tuple[str, object]]:
    if not Path(config.source).is_dir() and not HUB_NAME.fullmatch(config.source):
        raise ConfigError(
            f"{what}: {config.source!r} is no source: there is no such folder, and it is neither a function "
            "(package.module:function), nor a .jsonl or .parquet file, nor a data set on the hub (org/name)"
        )
    try:
        # here: its import takes two seconds, and who has no such source needs not have the extra
        from areal_agent.rollout.tasks.hugging_face import dataset_rows
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: {config.source!r} is a Hugging Face data set, and the package {error.name!r} is missing; install "
            "the extra: pip install 'areal-agent[datasets]'"
        ) from error
    return dataset_rows(config.source, split, config.args, what)
