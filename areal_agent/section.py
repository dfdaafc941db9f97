"""The base class of every config section, with the rules that all of them share, and objects named by import path.

Sections stand beside the component they configure (`engine/config.py`, `trainer/config.py` ...); `config.py` puts
them together.
"""

import importlib
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo

from areal_agent.errors import ConfigError

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`package.module:name`: how a config names an object of the user's."""


class Section(BaseModel):
    """A frozen model: unknown keys are errors, floats are finite, docstrings under fields are their documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse booleans for numbers: `steps: true` would be read as 1, and `off` is YAML for false."""
        kinds = _kinds(cls.model_fields[str(info.field_name)])
        if isinstance(value, bool) and not {int, float}.isdisjoint(kinds) and bool not in kinds:
            raise ValueError(f"is {value!r}; give a number")
        return value


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds; None for a value, and for a list of sections."""
    if get_origin(field.annotation) is tuple:
        return None
    return next((kind for kind in _kinds(field) if isinstance(kind, type) and issubclass(kind, Section)), None)


def is_named(field: FieldInfo) -> bool:
    """Return whether a field holds sections by names of the user's."""
    return get_origin(field.annotation) is dict and section_of(field) is not None


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    return (field.annotation, *get_args(field.annotation))


def is_import_path(name: str) -> bool:
    return IMPORT_PATH.fullmatch(name) is not None


def import_object(path: str, key: str) -> Any:
    """Import the object that the config's `key` names, `package.module:name`. Raises ConfigError."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{key}: {path!r} is not of the form 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way at import
        remedy = _remedy(error, module_name)
        raise ConfigError(f"{key}: {path!r} cannot be imported ({one_line(error)}); {remedy}") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ConfigError(
            f"{key}: {path!r} cannot be imported ({one_line(error)}); it is in {module.__file__}: check the name"
        ) from error


def _remedy(error: BaseException, module_name: str) -> str:
    """Return what would help a module that cannot be imported: another name, a package, or a change of its code."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module_name}.".startswith(f"{missing}."):
        return "check the name, and that it can be imported from the folder in which the run is started"
    place = last_line(error)
    if missing:
        return f"{place} needs the package {missing.partition('.')[0]!r}, which is not installed in {sys.prefix}"
    return f"the fault is at {place}"


LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))
OWN = str(Path(__file__).resolve().parent)


def last_line(error: BaseException) -> str:
    """Return `my_agent.py:12`: the last place of a traceback in a user's code, else in any; or the error's type."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not str(Path(frame.filename).resolve()).startswith((*LIBRARIES, OWN))]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    last = (own or frames)[-1:]
    return f"{Path(last[0].filename).name}:{last[0].lineno}" if last else type(error).__name__


def one_line(error: BaseException) -> str:
    """Return `ValueError: text` on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
