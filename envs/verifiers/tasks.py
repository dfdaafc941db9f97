"""The rows of a verifiers environment, by name."""

import hashlib
import importlib
import importlib.util
import json
import signal
from collections.abc import Mapping
from typing import Any

from areal_agent import ConfigError

SPLITS = ("train", "test")
INSTALL = "pip install 'verifiers>=0.3.1,<0.4'"


def require_verifiers() -> None:
    """Raise ConfigError where verifiers is not installed, or is not 0.3, which has environments and tasksets."""
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(f"the package 'verifiers' is missing; {INSTALL}")
    if importlib.util.find_spec("verifiers.legacy") is None:
        raise ConfigError(f"this version of verifiers is not the one that was tried; {INSTALL}")


def load(
    split: str, seed: int, environment: str, args: Mapping[str, Any] | None = None, size: int | None = None
) -> list[dict[str, Any]]:
    """Return the rows of `load_environment(environment, **args)`, at most `size`; its eval dataset is the split `test`.

    Without one, the hash of a row says whether it is held out, as one in five is. Raises ConfigError.
    """
    require_verifiers()
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}; valid: {', '.join(map(repr, SPLITS))}")
    given = dict(args or {})
    made = open_environment(environment, given)
    if made.requires_group_rollouts or not made.score_rollouts:
        raise ConfigError(f"{environment} does not score one rollout by itself; use one whose rubric does")
    made.build_eval_dataset()
    is_one = made.eval_dataset is None
    rows = [dict(row) for row in (made.get_dataset() if split == "train" or is_one else made.eval_dataset)]
    tasks = [
        {"id": f"{environment}-{row['example_id']}", "environment": environment, "args": given, "row": row}
        for row in rows
        if not is_one or is_held_out(row) == (split == "test")
    ]
    if not tasks:
        raise ConfigError(f"no row of {environment} is in the split {split!r}")
    return tasks[:size]


def open_environment(name: str, args: Mapping[str, Any]) -> Any:
    """Return an environment, which takes SIGINT and SIGTERM for itself: they are given back. Raises ConfigError."""
    vf: Any = importlib.import_module("verifiers")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return vf.load_environment(name, **args)
    except Exception as error:  # the boundary: an environment's own code may raise anything
        raise ConfigError(
            f"verifiers cannot load {name!r} with {dict(args)}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def is_held_out(row: Mapping[str, Any]) -> bool:
    """Return whether a row belongs to the split `test`, wherever it stands.

    >>> is_held_out({"example_id": 0, "prompt": "2+2?"}) == is_held_out({"example_id": 7, "prompt": "2+2?"})
    True
    """
    told = {key: value for key, value in row.items() if key != "example_id"}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).digest()[0] < 51
