"""Rows of files: JSONL and Parquet, each with its file and line. It knows no other source."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from areal_agent.errors import ConfigError

PARQUET_BATCH_ROWS = 4096
LONG_NUMBER = re.compile(rb"\d{19}")
"""Digits that may be of an integer beyond 64 bits."""


def jsonl_rows(path: Path, what: str) -> Iterator[tuple[str, object]]:
    """A JSON value a line; blank lines are passed over. Raises ConfigError with the file and the line."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _value(line)
    except OSError as error:
        raise _unreadable(path, what, error.strerror or str(error)) from error
    except ValueError as error:  # of either parser; an integer of thousands of digits is one of Python's own
        raise ConfigError(f"{what}: {path}:{number} is not JSON: {error}") from error


def parquet_rows(path: Path, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A dict a row, read batch by batch. Raises ConfigError; needs the extra `parquet`."""
    try:
        # here: who has no such file needs not have the extra
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
        raise ConfigError(f"{what}: {str(path)!r} is no Parquet file: {' '.join(str(error).split())}") from error


def _value(line: bytes) -> object:
    """Integers keep all their digits: orjson is strict and quick, but makes long ones floats."""
    value: object = orjson.loads(line)
    return json.loads(line) if LONG_NUMBER.search(line) else value


def _unreadable(path: Path, what: str, reason: str) -> ConfigError:
    where = "" if path.is_absolute() else f" (looked for from {str(Path.cwd())!r})"
    return ConfigError(f"{what}: cannot read {str(path)!r}: {reason}{where}")
