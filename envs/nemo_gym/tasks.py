"""The rows of a NeMo Gym data set, for the resources server that belongs to it."""

import json
from pathlib import Path
from typing import Any

from areal_agent import ConfigError


def load(
    split: str,
    seed: int,
    url: str,
    train: str | None = None,
    test: str | None = None,
    size: int | None = None,
    max_turns: int = 20,
    call_s: float = 60.0,
) -> list[dict[str, Any]]:
    """Return the rows of the JSONL file `train` or `test`, by the split, at most `size`, for the server at `url`.

    A rollout has at most `max_turns` answers, and a call of a tool takes at most `call_s`. Raises ConfigError.
    """
    files = {"train": train, "test": test}
    if split not in files:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, files))}")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url is {url!r}; give that of the resources server, as http://127.0.0.1:8000")
    if type(max_turns) is not int or max_turns < 1:
        raise ConfigError(f"max_turns is {max_turns!r}; give a whole number, at least 1")
    path = files[split]
    if path is None:
        raise ConfigError(f"there is no file for the split {split!r}; give {split}, a JSONL file of the data set")
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{split} is {path!r}, which cannot be read: {error}") from error
    rows = [row_of(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    limits = {"max_turns": max_turns, "call_s": call_s}
    return [
        {"id": f"{Path(path).stem}-{number}", "url": url.rstrip("/"), "row": row, **limits}
        for number, row in enumerate(rows[:size])
    ]


def row_of(line: str, place: str) -> dict[str, Any]:
    """Return a row of a data set, which has `responses_create_params` and whatever its server's /verify reads.

    >>> row_of('{"responses_create_params": {"input": "1+1?"}, "expected": 2}', "train.jsonl:1")["expected"]
    2
    """
    try:
        row = json.loads(line)
        if isinstance(row["responses_create_params"]["input"], str | list):
            return row
    except (ValueError, RecursionError, TypeError, KeyError):
        pass
    raise ConfigError(f"{place} is no row of NeMo Gym, an object with responses_create_params.input: {line:.100}")
