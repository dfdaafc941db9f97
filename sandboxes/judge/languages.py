"""How programs of a language are built and run in a sandbox. A new language is a new `Language`; no code changes.

Whether a sandbox's image has the language shows only when a program runs: see grade.py. `bundle` joins files of
`inside/` into one Python text that can be sent to a sandbox; `precompiled` spares such a text its compilation.
"""

import marshal
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from sandboxes import Limits

INSIDE = Path(__file__).parent / "inside"
BUILD_LIMITS = Limits(wall_s=30.0, memory_bytes=2**30, file_bytes=64 * 2**20, output_bytes=256 * 2**10)

PRECOMPILED = """\
import marshal, sys
exec(
    marshal.loads({code!r})
    if getattr(sys.modules.get("_frozen_importlib_external"), "MAGIC_NUMBER", b"") == {version!r}
    else compile({source!r}, {name!r}, "exec", dont_inherit=True, optimize=2)
)
"""


def precompiled(source: str, name: str, version: bytes = MAGIC_NUMBER) -> str:
    """Return source that does what `source` does but hardly has to be compiled.

    It spares a call 0.3 of 3.3 ms. A Python whose bytecode version is `version` runs the code as it is; any other
    compiles the included source. `name` is the file shown in tracebacks.

    >>> exec(precompiled("print(6 * 7)", "<example>"))
    42
    """
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=2))
    return PRECOMPILED.format(code=code, version=version, source=source, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """The commands `build` and `run`, which work in the folder that holds the program as `file`.

    >>> Language(name="awk", file="main.awk", run=("awk", "-f", "main.awk"), smallest='BEGIN { print "ok" }').build
    """

    name: str
    file: str
    run: tuple[str, ...] | None  # None: Python, in the sandbox's warm interpreter
    smallest: str  # a program that prints `ok`, to test whether the language works in a sandbox
    build: tuple[str, ...] | None = None
    build_limits: Limits = BUILD_LIMITS
    call: str | None = None  # a program that makes the call described on its stdin; None: no calls in this language


CALL = precompiled((INSIDE / "call.py").read_text(), "<call>")
PYTHON = Language(name="python", file="main.py", run=None, smallest='print("ok")', call=CALL)
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

LANGUAGES: Mapping[str, Language] = {language.name: language for language in (PYTHON, C, CPP, JAVASCRIPT, BASH)}


def language_of(language: str | Language) -> Language:
    """Return the language of that name, or the given `Language`."""
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
    """Return one text that runs `main` of the last of these files; the files before it are those that it imports."""
    modules = [
        (f"{PACKAGE}.{name}", precompiled((INSIDE / f"{name}.py").read_text(), f"{PACKAGE}.{name}")) for name in names
    ]
    return BUNDLE.format(package=PACKAGE, modules=modules)
