"""Objects of the user's by their import path, and his faults on one line. It knows not what an object is for."""

import importlib
from typing import Any

from areal_agent.errors import ConfigError


def import_object(path: str, what: str) -> Any:
    """Import `package.module:name`; raises ConfigError that says which half is wrong."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{what}: {path!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module of the user's may fail in any way at import
        raise ConfigError(
            f"{what}: importing {module_name!r} failed: {one_line(error)}; "
            "check the name and that it can be imported from this folder"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{what}: module {module_name!r} has no {name!r}") from None


def one_line(error: BaseException) -> str:
    """`ValueError: text`, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
