"""Runs the unit tests of a program that is in another sandbox, and reports how each ends, one message per line.

    ─▶ {"module": ..., "files": [...], "names": {...}}    the program's names, as serve_program.py gives them
    ◀─ {"tests": [name, ...]}, or {"broken": why, "is_ours": whether the program had no part in it}
    ◀─ {"start": index}
    ◀─ {"do": ...}  ─▶ {"value": ...} | {"raised": ...} | {"gone": why}        any number of times
    ◀─ {"end": index, "is_passed": ..., "detail": ...}, or {"refused": why}
    ◀─ {"done": true}

Tests are unittest classes, plain classes `Test*` and functions `test_*`. A test that skips itself while it runs fails.
"""

import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
import unittest
from collections.abc import Iterator
from typing import Any

from sandboxes.judge.inside.stand_in import Program, stand_in

MAX_DETAIL = 2_000


class Refused(Exception):
    """The tests cannot be judged."""


class Wire:
    """The messages to the host and back."""

    def __init__(self) -> None:
        self._inbound = os.fdopen(os.dup(0))
        self._outbound = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what tests print must not pass for a message
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def tell(self, message: dict[str, Any]) -> None:
        self._outbound.write(f"{json.dumps(message)}\n")
        self._outbound.flush()

    def hear(self) -> dict[str, Any]:
        return json.loads(self._inbound.readline())

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.tell(request)
        return self.hear()


class ToldResult(unittest.TestResult):
    """Reports each test to the host. A listed test that is not reported as passed has failed."""

    def __init__(self, wire: Wire, program: Program, tests: list[unittest.TestCase]) -> None:
        super().__init__()
        self._wire = wire
        self._program = program
        self._indices = {id(test): index for index, test in enumerate(tests)}
        self._details: dict[int, str] = {}
        self._passed: set[int] = set()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._program.is_gone = False
        self._wire.tell({"start": self._indices[id(test)]})

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        if self._program.refused:
            self._wire.tell({"refused": self._program.refused})
        index = self._indices[id(test)]
        is_passed = index in self._passed and index not in self._details and not self._program.is_gone
        self._wire.tell({"end": index, "is_passed": is_passed, "detail": self._details.get(index, "")})

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._passed.add(self._indices[id(test)])

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._fail(test, f"skipped: {reason}")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._fail(test, "".join(traceback.format_exception(*err)))

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)

    def _fail(self, test: unittest.TestCase, detail: str) -> None:
        index = self._indices.get(id(test))  # None: the set-up of a class or module
        if index is not None:
            self._details[index] = detail[-MAX_DETAIL:]


def collect(files: list[str]) -> unittest.TestSuite:
    return unittest.TestSuite(suite_of(load(path)) for path in files)


def load(path: str) -> types.ModuleType:
    name = path.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def suite_of(module: types.ModuleType) -> unittest.TestSuite:
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    for name, found in list(vars(module).items()):
        if isinstance(found, types.FunctionType) and name.startswith("test"):
            suite.addTest(plain_test(found))
        elif isinstance(found, type) and name.startswith("Test") and not issubclass(found, unittest.TestCase):
            methods = [key for key in vars(found) if key.startswith("test")]
            suite.addTests(plain_test(getattr(found(), key)) for key in methods)
    return suite


def plain_test(function: Any) -> unittest.TestCase:
    if inspect.signature(function).parameters:
        raise Refused(f"{function.__name__} takes arguments; only tests without fixtures can be judged")
    return unittest.FunctionTestCase(function)


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


def judged(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    """Return the tests that count: those that are not marked to be skipped."""
    tests = [test for test in flat(suite) if not marked(test, "__unittest_skip__")]
    for test in tests:
        if marked(test, "__unittest_expecting_failure__"):
            raise Refused(f"{test.id()} is expected to fail; what passes it cannot be told from what does not")
    return tests


def marked(test: unittest.TestCase, mark: str) -> bool:
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    function = getattr(test, "_testFunc", None)  # of a plain function
    return any(getattr(target, mark, False) for target in (test, type(test), method, function))


def main() -> None:
    wire = Wire()
    sys.path.insert(0, "")
    order = wire.hear()
    program = Program(wire.ask)
    sys.modules[order["module"]] = stand_in(order["module"], program, order["names"])
    try:
        suite = collect(order["files"])
        tests = judged(suite)
    except BaseException as error:  # the boundary: test files are foreign code
        why = "".join(traceback.format_exception_only(error)).strip()
        # A missing module is the tests' own fault; an assertion may fail because of a value that the program gave.
        is_independent = not program.has_answered or isinstance(error, ImportError | SyntaxError)
        is_ours = bool(program.refused) or (is_independent and not program.has_failed)
        wire.tell({"broken": program.refused or why, "is_ours": is_ours})
        return
    wire.tell({"tests": [test.id().rpartition(".")[2] for test in tests]})
    # Run them in the suites of their classes, which set up and tear down what a class or module shares.
    only(suite, {id(test) for test in tests}).run(ToldResult(wire, program, tests))
    wire.tell({"done": True})


def only(suite: unittest.TestSuite, kept: set[int]) -> unittest.TestSuite:
    inner = [only(test, kept) if isinstance(test, unittest.TestSuite) else test for test in suite]
    return unittest.TestSuite(test for test in inner if isinstance(test, unittest.TestSuite) or id(test) in kept)


if __name__ == "__main__":
    main()
