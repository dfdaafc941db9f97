"""The base of every config section. It knows the rules that all sections share, and no section.

Sections stand beside the component they configure (`engine/config.py`, `trainer/config.py` ...); `config.py` puts
them together.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys are errors; floats are finite; docstrings under fields are their documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
