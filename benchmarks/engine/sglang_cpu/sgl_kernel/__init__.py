"""A stand-in for SGLang's compiled operators, which PyPI has no CPU build of: every name exists, every call raises."""

from typing import Any

__version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: the compiled operator is not here")

    return absent
