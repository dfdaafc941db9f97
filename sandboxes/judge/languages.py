"""How programs of a language are built and run in a sandbox. Another language is another `Language`; no code changes.

It runs nothing. Whether the sandbox's image has the language shows when a program is to be run: see programs.py.

A file of `inside/` with the others that it imports, as one text of Python. It runs nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sandboxes import Limits
from sandboxes.sessions import precompiled

INSIDE = Path(__file__).parent / "inside"
BUILD_LIMITS = Limits(wall_s=30.0, memory_bytes=2**30, file_bytes=64 * 2**20, output_bytes=256 * 2**10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """`build` and `run` are commands in the folder that holds the program as `file`.

    >>> Language(name="awk", file="main.awk", run=("awk", "-f", "main.awk"), smallest='BEGIN { print "ok" }').build
    """

    name: str
    file: str
    run: tuple[str, ...] | None  # None: Python in the sandbox's warm interpreter
    smallest: str  # a program that prints `ok`: what shows that the language works in a sandbox
    build: tuple[str, ...] | None = None
    build_limits: Limits = BUILD_LIMITS
    call: str | None = None  # a program that makes the call that its stdin tells of; None: no calls in this language


PYTHON = Language(
    name="python",
    file="main.py",
    run=None,
    smallest='print("ok")',
    call=precompiled((INSIDE / "call.py").read_text(), "<call>"),
)
C = Language(
    name="c",
    file="main.c",
    build=("gcc", "-O2", "-std=gnu17", "-o", "program", "main.c", "-lm"),
    run=("./program",),
    smallest='#include <stdio.h>\nint main(void) { puts("ok"); return 0; }\n',
)
CPP = Language(
    name="cpp",
    file="main.cpp",
    build=("g++", "-O2", "-std=gnu++20", "-o", "program", "main.cpp"),
    run=("./program",),
    smallest='#include <cstdio>\nint main() { puts("ok"); }\n',
)
JAVASCRIPT = Language(
    name="javascript",
    file="main.js",
    run=("node", "main.js"),
    smallest='console.log("ok")',
    call=(INSIDE / "call.js").read_text(),
)
BASH = Language(name="bash", file="main.sh", run=("bash", "main.sh"), smallest="echo ok")

LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {language.name: language for language in (PYTHON, C, CPP, JAVASCRIPT, BASH)}
)


def language_of(language: str | Language) -> Language:
    """The language of that name, or the one that is given."""
    if isinstance(language, Language):
        return language
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}; there are {', '.join(LANGUAGES)}, and you may give a Language")
    return LANGUAGES[language]


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
