"""A file of `inside/` with the others that it imports, as one text of Python. It runs nothing."""

from collections.abc import Sequence

from sandboxes.judge.languages import INSIDE
from sandboxes.precompiled import precompiled

PACKAGE = "sandboxes.judge.inside"
BUNDLE = """\
import sys, types

def add(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), module.__dict__)
    return module

for name in ("sandboxes", "sandboxes.judge", {package!r}):
    add(name, "")
for name, source in {modules!r}:
    main = add(name, source)
for name in [name for name in sys.modules if name.split(".")[0] == "sandboxes"]:
    del sys.modules[name]  # a program may have a module of that name
main.main()
"""


def bundle(*names: str) -> str:
    """The last of these files with the ones before it, which it imports."""
    return BUNDLE.format(package=PACKAGE, modules=_sources(names))


def _sources(names: Sequence[str]) -> list[tuple[str, str]]:
    full_names = [f"{PACKAGE}.{name}" for name in names]
    texts = [(INSIDE / f"{name}.py").read_text() for name in names]
    return [(name, precompiled(text, name)) for name, text in zip(full_names, texts, strict=True)]
