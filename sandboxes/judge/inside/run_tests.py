"""Runs the unit tests of a program that is in another sandbox with pytest, and reports how each ends, a message a line.

    ◀─ {"python": [3, 11], "bytecode": ...}
    ─▶ {"module": ..., "files": [...], "names": {...}, "pytest": length}, and pytest, in so many bytes
    ◀─ {"tests": [name, ...]}, or {"broken": why, "is_ours": whether the program had no part in it}
    ◀─ {"start": index}
    ◀─ {"do": ...}  ─▶ {"value": ...} | {"raised": ...} | {"gone": why}        any number of times
    ◀─ {"end": index, "is_passed": ..., "detail": ...}, or {"refused": why}
    ◀─ {"done": true}

A test passes only if its set-up, call and tear-down did. An error in the tear-down of a class, a module or the session
fails all tests in it. Tests that skip themselves fail; those marked to be skipped are left out, unless the program has
told something by which that may have been decided. pytest comes from the host: see `pytest_modules` in unit_tests.py.
"""

import contextlib
import importlib.machinery
import importlib.util
import inspect
import io
import json
import marshal
import os
import sys
import traceback
from typing import Any, cast

from sandboxes.judge.inside.stand_in import Program, RemoteClass, RemoteObject, StandIn

MAX_DETAIL = 2_000
MAX_NAME = 200
OPTIONS = (
    *("-q", "--color=no", "--tb=short", "--capture=sys", "-o", "addopts="),
    *("-p", "no:cacheprovider", "-p", "no:doctest", "-p", "no:faulthandler"),
)
OLDEST_PYTHON = (3, 11)
"""The oldest Python for which the host's pytest is complete; below, the image needs a pytest of its own."""


class Refused(Exception):
    """The tests cannot be judged."""


class Wire:
    """The messages to the host and back."""

    def __init__(self) -> None:
        self._inbound = os.fdopen(os.dup(0), "rb")
        self._outbound = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what tests print must not pass for a message
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def tell(self, message: "dict[str, Any]") -> None:
        self._outbound.write(f"{json.dumps(message)}\n")
        self._outbound.flush()

    def hear(self, num_bytes: int = 0) -> Any:
        return self._inbound.read(num_bytes) if num_bytes else json.loads(self._inbound.readline())

    def ask(self, request: "dict[str, Any]") -> "dict[str, Any]":
        self.tell(request)
        with contextlib.suppress(ValueError, RecursionError):
            reply = self.hear()
            if isinstance(reply, dict):
                return reply
        return {}


class Bundle:
    """Modules in memory, as `sys.meta_path` takes them: by name, the file, whether it is a package, and the code."""

    def __init__(self, modules: "dict[str, tuple[str, bool, Any]]") -> None:
        self._modules = modules

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name not in self._modules:
            return None
        file, is_package, _ = self._modules[name]
        spec: Any = importlib.machinery.ModuleSpec(name, cast("Any", self), origin=file, is_package=is_package)
        spec.has_location = True
        return spec

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        file, _, code = self._modules[module.__name__]
        is_bytecode = isinstance(code, bytes)
        exec(marshal.loads(code) if is_bytecode else compile(code, file, "exec", dont_inherit=True), vars(module))


class Reporter:
    """A plugin of pytest that reports to the host. A listed test that is not reported as passed has failed."""

    def __init__(self, wire: Wire, program: Program) -> None:
        self.wire = wire
        self.program = program
        self.is_listed = False
        self.error: Any = None  # the first that kept the tests from being loaded
        self.refused = ""
        self.items: list[Any] = []
        self.indices: dict[str, int] = {}
        self.ended: list[Any] = []  # the tests of the classes, modules and the session that the running test is last of
        self.was_bad = False

    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> Any:
        if isinstance(obj, (RemoteObject, RemoteClass)):
            return []  # of the program, however it is named
        is_generator = inspect.isasyncgenfunction(obj) or inspect.isgeneratorfunction(obj)
        if is_generator and collector.istestfunction(obj, name):
            self.refused = f"{name} is a generator, which nothing runs"
        return None

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        if not self.is_listed and self.error is None:
            error = call.excinfo.value
            self.error = error.__cause__ or error

    def pytest_internalerror(self, excinfo: Any) -> None:
        self.error = self.error or excinfo.value

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped and self.program.has_told:
            self.error = self.error or Refused("a file of tests skips itself, after the program told something")

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            method, kinds = item.obj, [kind.__name__ for kind in getattr(item.cls, "__mro__", ())]
            if item.get_closest_marker("xfail") or getattr(method, "__unittest_expecting_failure__", False):
                self.refused = f"{item.name} is expected to fail; what passes it cannot be told from what does not"
            elif inspect.iscoroutinefunction(method) and "TestCase" in kinds and "IsolatedAsyncioTestCase" not in kinds:
                self.refused = f"{item.name} is async, which nothing runs; derive from IsolatedAsyncioTestCase"
        if self.refused:
            self.wire.tell({"refused": self.refused})
        items = [item for item in session.items if self.program.has_told or not is_skipped(item)]
        if not items and self.program.has_told:
            self.error = self.error or Refused("there is no test, after the program told something")
        self.is_listed = session.testsfailed == 0 and self.error is None
        session.items[:] = self.items = items if self.is_listed else []
        self.indices = {item.nodeid: index for index, item in enumerate(self.items)}
        if self.is_listed:
            self.wire.tell({"tests": [item.name[:MAX_NAME] for item in self.items]})
        if unittest := sys.modules.get("unittest"):
            unittest.TestCase._callTestMethod = self.call_method

    def call_method(self, method: Any) -> None:
        """Call a method of a plain TestCase, whose result would be thrown away even if it is a coroutine."""
        self.require_run(method(), method.__name__)

    def require_run(self, result: Any, name: str) -> None:
        if inspect.iscoroutine(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            self.wire.tell({"refused": f"{name} gives a {type(result).__name__}, which nothing runs"})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.program.is_gone, self.program.unjudged = False, ""
        self.passed: list[str] = []  # phases of the running test
        self.failed: list[str] = []
        self.detail = ""
        self.wire.tell({"start": self.indices[nodeid]})

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        result = pyfuncitem.obj(**arguments)
        if inspect.iscoroutine(result):
            import asyncio  # here, since few tests need it and it takes long

            asyncio.run(result)
        else:
            self.require_run(result, pyfuncitem.name)
        return True

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if inspect.iscoroutinefunction(fixturedef.func) or inspect.isasyncgenfunction(fixturedef.func):
            self.wire.tell({"refused": f"the fixture {fixturedef.argname} is async, which nothing runs"})

    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        left = set(item.listchain()) - set(nextitem.listchain() if nextitem else [])
        self.ended = [other for other in self.items if left & set(other.listchain())]
        self.was_bad = self.program.is_bad

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed or hasattr(report, "wasxfail"):
            self.failed.append(report.when)
            self.detail = self.detail or report.longreprtext[-MAX_DETAIL:] or report.outcome
        elif type(report).__name__ == "TestReport":  # not of a subtest
            self.passed.append(report.when)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        own = self.indices[nodeid]
        detail = self.program.unjudged or self.detail
        if "teardown" not in self.passed or self.program.is_bad != self.was_bad:
            for index in {self.indices[item.nodeid] for item in self.ended} - {own}:
                self.wire.tell({"end": index, "is_passed": False, "detail": f"tear-down: {detail}"[:MAX_DETAIL]})
        is_passed = self.passed == ["setup", "call", "teardown"] and not self.failed and not self.program.is_bad
        self.wire.tell({"end": own, "is_passed": is_passed, "detail": detail})


def is_skipped(item: Any) -> bool:
    """Return whether a test is marked to be skipped."""
    from _pytest.skipping import evaluate_skip_marks  # here, since pytest comes only after the program has started

    is_marked = any(getattr(target, "__unittest_skip__", False) for target in (item.cls, item.obj))
    return is_marked or evaluate_skip_marks(item) is not None


def main() -> None:
    wire = Wire()
    sys.path.insert(0, "")
    wire.tell({"python": list(sys.version_info[:2]), "bytecode": importlib.util.MAGIC_NUMBER.hex()})
    order = wire.hear()
    modules = marshal.loads(wire.hear(order["pytest"]))
    if sys.version_info >= OLDEST_PYTHON:
        sys.meta_path.insert(0, cast("Any", Bundle(modules)))
    elif importlib.util.find_spec("pytest") is None:
        sys.exit("its Python is too old for the host's pytest, and it has no other; use an image with Python 3.11")
    import pytest

    program = Program(wire.ask)
    sys.modules[order["module"]] = StandIn(order["module"], program, order["names"])
    sys.dont_write_bytecode = True
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    reporter = Reporter(wire, program)
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = pytest.main([*OPTIONS, *order["files"]], plugins=[reporter])
    if not reporter.is_listed:
        error = reporter.error
        why = "".join(traceback.format_exception_only(type(error), error) if error else said.getvalue()[-MAX_DETAIL:])
        # A missing module is the tests' own fault; an assertion may fail because of a value that the program gave.
        is_independent = not program.has_answered or isinstance(error, (ImportError, SyntaxError))
        wire.tell({"broken": program.unjudged or why.strip(), "is_ours": is_independent and not program.has_failed})
    wire.tell({"done": int(code)})


if __name__ == "__main__":
    main()
