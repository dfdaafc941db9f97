"""A problem: a function that solves it, a bug to put into that function, and arguments for its cases."""

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem. `solution` is a function without imports whose docstring is the question; `bug` replaces a part."""

    solution: Callable[..., Any]
    bug: tuple[str, str]
    visible: Sequence[tuple[Any, ...]]  # arguments of the cases that a model may see
    hidden: Sequence[tuple[Any, ...]]

    @property
    def name(self) -> str:
        return self.solution.__name__

    @property
    def asked(self) -> str:
        """The task of the function, in its author's words: the docstring of the solution."""
        return inspect.cleandoc(self.solution.__doc__ or "")

    @property
    def program(self) -> str:
        """The solution without its docstring."""
        [function] = ast.parse(inspect.getsource(self.solution)).body
        assert isinstance(function, ast.FunctionDef)
        function.body = function.body[1:]
        return ast.unparse(function)

    @property
    def broken_program(self) -> str:
        """The solution with its bug."""
        right, wrong = self.bug
        if self.program.count(right) != 1:
            raise ValueError(f"the bug of {self.name} replaces {right!r}, which must stand in the program once")
        return self.program.replace(right, wrong)

    @property
    def signature(self) -> str:
        return f"{self.name}{inspect.signature(self.solution)}"

    def cases(self, arguments: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        """Return arguments with their results, as JSON."""
        return [[list(args), self.solution(*args)] for args in arguments]
