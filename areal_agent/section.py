"""The base class of every config section, with the rules that all of them share.

Sections stand beside the component they configure (`engine/config.py`, `trainer/config.py` ...); `config.py` puts
them together.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic.fields import FieldInfo
from pydantic_core.core_schema import ValidationInfo

NUMBERS = frozenset({int, float})


class Section(BaseModel):
    """A frozen model: unknown keys are errors, floats are finite, docstrings under fields are their documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse booleans for numbers: `steps: true` would be read as 1, and `off` is YAML for false."""
        if isinstance(value, bool) and _is_number(cls.model_fields[str(info.field_name)]):
            raise ValueError(f"is {value!r}; give a number")
        return value


def _is_number(field: FieldInfo) -> bool:
    kinds: set[Any] = {field.annotation, *get_args(field.annotation)}
    return bool(kinds & NUMBERS) and bool not in kinds
