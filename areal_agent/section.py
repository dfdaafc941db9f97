"""The base class of every config section, with the rules that all of them share.

Sections stand beside the component they configure (`engine/config.py`, `trainer/config.py` ...); `config.py` puts
them together.
"""

from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo


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
