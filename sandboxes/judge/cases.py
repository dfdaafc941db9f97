"""What a program is judged by: texts in and out, calls with JSON in and out, or files of unit tests. Data."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandboxes import Limits

JsonValue = Any
"""None, bool, int, float, str, list, and dict with str keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdinCase:
    """The program reads `stdin` and must print `expected`.

    >>> StdinCase(stdin="1 2", expected="3").limits is None
    True
    """

    stdin: str
    expected: str
    limits: Limits | None = None  # None: those of all cases


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCase:
    """`function(*args)`, a function of the program or a method of its class `Solution`, must return `expected`.

    Arguments and result are JSON: a tuple counts as a list. Each call is in a process of its own.

    >>> CallCase(function="add", args=[1, 2], expected=3).function
    'add'
    """

    function: str
    args: Sequence[JsonValue]
    expected: JsonValue
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if not self.function.isidentifier():
            raise ValueError(f"CallCase.function is {self.function!r}; give the name of a function, without its class")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTests:
    """Files of tests that import the program as `module`: unittest classes, and plain functions `test_*`.

    The tests run in a sandbox into which the program never comes; `module` is a stand-in there, which sends each call
    to the program's sandbox and its result back, both as plain data. So a test may

    - call functions of the program, make objects of its classes, call their methods, read their attributes, and use
      `len`, `in`, `[...]`, iteration and `str` on them;
    - give and get None, booleans, numbers, text, bytes, lists, tuples, sets and dicts of these, and objects that the
      program made. Arguments are copies: a change that the program makes to one does not show in the test;
    - expect exceptions: built-in ones and those of the program.

    It cannot be passed by an object that calls itself equal: objects of the program equal themselves alone. A test that
    hands the program a function, a class or an object of its own cannot be judged; `grade` refuses it by ValueError.
    `from solution import *` is refused: the program would say what `abs` is, by which its results are judged.

    >>> UnitTests(files={"test_it.py": "from solution import add\\ndef test_add(): assert add(1, 2) == 3"}).module
    'solution'
    """

    files: Mapping[str, str]  # by path; those named test*.py or *_test.py hold tests, others are imported by them
    module: str = "solution"

    def __post_init__(self) -> None:
        if not self.module.isidentifier():
            raise ValueError(f"UnitTests.module is {self.module!r}; give the name of a module")
        if not self.test_files:
            raise ValueError(f"UnitTests.files are {sorted(self.files)}; none is named test*.py or *_test.py")
        for path, source in self.files.items():
            if path.endswith(".py") and takes_all_names(source, self.module):
                raise ValueError(f"UnitTests.files[{path!r}] takes all names of the program; import them one by one")

    @property
    def test_files(self) -> list[str]:
        """The files that hold tests, in their order."""
        names = {path: path.rpartition("/")[2] for path in self.files}
        return [
            path
            for path, name in names.items()
            if name.endswith("_test.py") or (name.startswith("test") and name.endswith(".py"))
        ]


def takes_all_names(source: str, module: str) -> bool:
    """Whether it holds `from module import *`.

    >>> takes_all_names("from solution import *", "solution"), takes_all_names("from math import *", "solution")
    (True, False)
    """
    try:
        nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError):  # found when the tests are loaded
        return False
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module]
    return any(alias.name == "*" for node in imports for alias in node.names)


Cases = Sequence[StdinCase] | Sequence[CallCase] | UnitTests
