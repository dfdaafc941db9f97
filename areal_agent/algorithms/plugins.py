"""A user's own advantage or loss, found by its import path. It knows neither what it computes nor when it is called."""

import importlib
from collections.abc import Callable
from typing import Any

from areal_agent.errors import ConfigError


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function at `package.module:function`, which the config names under `key`. Raises ConfigError."""
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
    return found
