"""Loads demonstrations by their import path, so that no environment is imported by name. It knows no model."""

import importlib
from collections.abc import Callable, Iterator
from typing import cast

from areal_agent.errors import ConfigError
from areal_agent.models.tokenizer import Conversation

Demonstrations = Callable[[int], Iterator[Conversation]]
"""`demonstrations(seed)`: conversations without end."""


def load_demonstrations(path: str) -> Demonstrations:
    """Import `package.module:function`; raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"demonstrations: {path!r} is not of the form 'package.module:function'")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f"demonstrations: importing {module_name!r} failed: {error}; run it where that package can be imported"
        ) from error
    if not callable(found):
        raise ConfigError(f"demonstrations: {module_name!r} has no function {name!r}")
    return cast(Demonstrations, found)
