"""metrics.jsonl: one JSON object a line, appended and flushed. It knows nothing of what the rows mean.

A process that dies while it writes leaves a torn last line: whoever reads skips it, whoever reopens removes it.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from areal_agent.errors import ArealAgentError


class MetricsLog:
    """The file, open for appending. Numbers that are not finite are written as null. End it with `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        _remove_torn_line(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is in the file when this returns. Numbers may be numpy's.

        Raises ArealAgentError when it cannot be written whole; the file is then as before.
        """
        options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
        line = memoryview(orjson.dumps(dict(row), option=options))
        before = self._file.seek(0, os.SEEK_END)
        try:
            while line:  # a disk that is nearly full takes a part of it
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise ArealAgentError(
                f"{self._file.name} could not be written: {error.strerror}; make room on its disk and resume the run"
            ) from error

    def close(self) -> None:
        """Harmless when closed before."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows in the order of writing, without a torn last line. Raises ArealAgentError for a broken line before."""
    *lines, _torn = path.read_bytes().split(b"\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            raise ArealAgentError(f"{path}, line {number} is no JSON: {line[:80]!r}; remove that line") from None
    return rows


def _remove_torn_line(path: Path) -> None:
    """Cut off what stands behind the last line break."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)
