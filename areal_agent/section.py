"""The base class of every config section, with the rules that all of them share, and objects named by import path.

Sections stand beside the component they configure (`engine/config.py`, `trainer/config.py` ...); `config.py` puts
them together.
"""

import importlib
import re
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
        return getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way at import
        raise ConfigError(
            f"{key}: {path!r} cannot be imported ({one_line(error)}); check the name, and that it can be imported from "
            "the folder in which the run is started"
        ) from error


def one_line(error: BaseException) -> str:
    """Return `ValueError: text` on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
