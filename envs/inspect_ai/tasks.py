"""The samples of an inspect_ai task."""

import hashlib
import importlib
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

from areal_agent import ConfigError

SPLITS = ("train", "test")
INSTALL = "the package 'inspect_ai' is missing; pip install 'areal-agent[inspect-ai]'"


def require_inspect_ai() -> None:
    """Raise ConfigError where inspect_ai is not installed."""
    if importlib.util.find_spec("inspect_ai") is None:
        raise ConfigError(INSTALL)


def load(
    split: str, seed: int, task: str, args: Mapping[str, Any] | None = None, size: int | None = None
) -> list[dict[str, Any]]:
    """Return the samples of `task`, MODULE:FUNCTION called with `args`: of a split, at most `size`.

    The hash of a sample's input says whether it is held out, as one in five is. Raises ConfigError.
    """
    require_inspect_ai()
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SPLITS))}")
    given = dict(args or {})
    ids = [
        number if sample.id is None else sample.id  # as `eval` names them
        for number, sample in enumerate(open_task(task, given).dataset, start=1)
        if is_held_out(sample.input) == (split == "test")
    ]
    samples = [{"id": f"{task}-{one}", "task": task, "args": given, "sample": one} for one in ids]
    if not samples:
        raise ConfigError(f"no sample of {task} is in the split {split!r}")
    return samples[:size]


def open_task(name: str, args: Mapping[str, Any]) -> Any:
    """Return an inspect_ai Task. Raises ConfigError."""
    from inspect_ai import Task  # pyright: ignore

    module, _, function = name.partition(":")
    try:
        task = getattr(importlib.import_module(module), function)(**args)
    except Exception as error:  # the boundary: a task's own code may raise anything
        raise ConfigError(
            f"task is {name!r}, which fails with {dict(args)}: {type(error).__name__}: {error}; give MODULE:FUNCTION "
            "of an installed package or a file in this folder, and its arguments in args"
        ) from error
    if not isinstance(task, Task):
        raise ConfigError(f"{name} returned {type(task).__name__}; a function with @task returns inspect_ai.Task")
    return task


def is_held_out(asked: object) -> bool:
    """Return whether a sample with this input belongs to the split `test`.

    >>> [is_held_out(f"{number}+1?") for number in range(5)]
    [False, False, False, False, False]
    """
    text = asked if isinstance(asked, str) else json.dumps(asked, default=str)
    return hashlib.sha256(text.encode()).digest()[0] < 51
