"""A checker of a task's own: Python that decides whether an output is right, in a sandbox of its own.

It never shares a sandbox with the program that it judges. That it fails on an output is no fault of the judge's: the
output is then not right, since honest checkers fail on outputs of no sense.
"""

import ast
import asyncio
import json
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from sandboxes import Limits, Sandbox
from sandboxes.judge.languages import INSIDE
from sandboxes.precompiled import precompiled

CHECK = precompiled((INSIDE / "check.py").read_text(), "<check>")


@dataclass(frozen=True, slots=True)
class CustomChecker:
    """Python that defines `check(stdin, expected, output)`, three texts, and returns True, False or a score.

    A score is a finite number from 0 to 1; 1 alone passes. For calls, the texts are JSON: the arguments, the expected
    result, the result.

    >>> CustomChecker("def check(stdin, expected, output): return sorted(output) == sorted(expected)").limits is None
    True
    """

    source: str
    limits: Limits | None = None  # of one check; None: those of the pool

    def __post_init__(self) -> None:
        try:
            tree = ast.parse(self.source)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the checker is not Python: {error}") from None
        if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
            raise ValueError("the checker defines no function check(stdin, expected, output)")


class CustomChecks:
    """Runs a custom checker, in one sandbox that starts with the first check."""

    def __init__(self, checker: CustomChecker, acquire: AbstractAsyncContextManager[Sandbox]) -> None:
        self._checker = checker
        self._acquire = acquire
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._box: Sandbox | None = None

    async def score(self, stdin: str, expected: str, output: bytes) -> float:
        """From 0 to 1; 0 for a check that fails or returns anything else."""
        request = {
            "checker": self._checker.source,
            "stdin": stdin,
            "expected": expected,
            "output": output.decode(errors="replace"),
        }
        box = await self._started()
        result = await box.exec_python(CHECK, stdin=json.dumps(request).encode(), limits=self._checker.limits)
        return score_of(result.stdout) if result.is_ok else 0.0

    async def aclose(self) -> None:
        await self._stack.aclose()

    async def _started(self) -> Sandbox:
        async with self._starting:
            if self._box is None:
                self._box = await self._stack.enter_async_context(self._acquire)
            return self._box


def score_of(said: bytes) -> float:
    """What a checker returned, as a score.

    >>> score_of(b"true"), score_of(b"0.5"), score_of(b"NaN"), score_of(b"2"), score_of(b"[1]")
    (1.0, 0.5, 0.0, 0.0, 0.0)
    """
    try:
        score = json.loads(said)
    except (ValueError, RecursionError):
        return 0.0
    if isinstance(score, bool | int | float) and 0 <= score <= 1:
        return float(score)
    return 0.0
