"""A user's own advantage or loss, found by its import path. It knows neither what it computes nor when it is called."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from areal_agent.errors import ConfigError


def load_advantage(path: str) -> Callable[..., Any]:
    """The function that `algorithm.advantage` names: `package.module:function`. Raises ConfigError."""
    return _load(path, "algorithm.advantage", ("records", "rewards", "config"))


def load_loss(path: str) -> Callable[..., Any]:
    """The function that `algorithm.loss` names. Raises ConfigError."""
    return _load(path, "algorithm.loss", ("tokens", "config"))


def _load(path: str, key: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a module of the user's may fail in any way at import
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {path!r} cannot be imported ({type(error).__name__}: {reason}); check the name, and that it can "
            "be imported from the folder in which the run is started"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key}: {path!r} is a {type(found).__name__}; give a function")
    if not _takes(found, len(arguments)):
        raise ConfigError(f"{key}: {path!r} cannot be called with ({', '.join(arguments)}); let it take these")
    return found


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError:
        return False
    except ValueError:  # of some that are written in C nobody knows
        return True
    return True
