"""How a Python is started that has of this package what is in `inner/`, and no more. It starts none."""

from pathlib import Path

INNER = Path(__file__).with_name("inner")
BOOT = (
    "import sys, types; package = sys.modules['sandboxes'] = types.ModuleType('sandboxes'); "
    "package.__path__ = []; inner = sys.modules['sandboxes.inner'] = types.ModuleType('sandboxes.inner'); "
    "inner.__path__ = [sys.argv.pop(1)]; from sandboxes.inner.{module} import main; main()"
)
"""Runs one module of `inner/` without the package's `__init__`, which imports what is of no use there."""


def python_on(module: str, interpreter: str, folder: str = str(INNER)) -> list[str]:
    """The command for one of its modules; `folder`: where `inner/` is for that process."""
    return [interpreter, "-I", "-S", "-X", "utf8", "-c", BOOT.format(module=module), folder]
