"""Runs the unit tests of a program that is in another sandbox with pytest, and reports how each ends, a message a line.

    ◀─ {"bytecode": the version of it that this Python runs}
    ─▶ {"module": ..., "files": [...], "names": {...}, "pytest": length}, and pytest, in so many bytes
    ◀─ {"tests": [name, ...]}, or {"broken": why, "is_ours": whether the program had no part in it}
    ◀─ {"start": index}
    ◀─ {"do": ...}  ─▶ {"value": ...} | {"raised": ...} | {"gone": why}        any number of times
    ◀─ {"end": index, "is_passed": ..., "detail": ...}

A test passes only if its set-up, call and tear-down ran and passed. pytest comes from the host: see `pytest_modules` in
unit_tests.py.
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
import threading
import traceback
from typing import Any, cast

from sandboxes.judge.inside.stand_in import Program, RemoteClass, RemoteObject, StandIn

MAX_DETAIL = 2_000
MAX_NAME = 200
OPTIONS = (
    *("-q", "--color=no", "--tb=short", "--capture=sys", "-o", "addopts="),
    *("-p", "no:cacheprovider", "-p", "no:doctest", "-p", "no:faulthandler"),
    *("-W", "error::pytest.PytestAssertRewriteWarning"),  # a tuple is asserted, which is always true
    *("-W", "error::pytest.PytestUnhandledThreadExceptionWarning"),
)
OLDEST_PYTHON = (3, 11)
"""The oldest Python for which the host's pytest is complete; below, the image needs a pytest of its own."""


class Wire:
    """The messages to the host and back."""

    def __init__(self) -> None:
        self._inbound = os.fdopen(os.dup(0), "rb")
        self._outbound = os.fdopen(os.dup(1), "w")
        self._asking = threading.RLock()  # tests may have threads
        os.dup2(2, 1)  # what tests print must not pass for a message
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def tell(self, message: "dict[str, Any]") -> None:
        self._outbound.write(f"{json.dumps(message)}\n")
        self._outbound.flush()

    def hear(self, num_bytes: int = 0) -> Any:
        return self._inbound.read(num_bytes) if num_bytes else json.loads(self._inbound.readline())

    def ask(self, request: "dict[str, Any]") -> "dict[str, Any]":
        with self._asking:
            self.tell(request)
            with contextlib.suppress(ValueError, RecursionError):
                reply = self.hear()
                return reply if isinstance(reply, dict) else {}
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
        self.items: list[Any] = []
        self.indices: dict[str, int] = {}
        self.ended: list[Any] = []  # the tests of the classes, modules and the session that the running test is last of
        self.was_bad = False

    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: Any) -> Any:
        return [] if isinstance(obj, (RemoteObject, RemoteClass)) else None  # of the program, however it is named

    def pytest_exception_interact(self, call: Any, report: Any) -> None:
        if not self.is_listed and self.error is None:
            error = call.excinfo.value
            self.error = error.__cause__ or error

    def pytest_internalerror(self, excinfo: Any) -> None:
        self.error = self.error or excinfo.value

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped:
            self.error = self.error or ValueError("a file of tests skips itself; leave it out")

    def pytest_collection_finish(self, session: Any) -> None:
        if not session.items:
            self.error = self.error or ValueError("the test files hold no test; give at least one")
        self.is_listed = session.testsfailed == 0 and self.error is None
        session.items[:] = self.items = session.items if self.is_listed else []
        self.indices = {item.nodeid: index for index, item in enumerate(self.items)}
        if self.is_listed:
            self.wire.tell({"tests": [item.name[:MAX_NAME] for item in self.items]})
        if unittest := sys.modules.get("unittest"):
            unittest.TestCase._callTestMethod = call_method

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

            result = asyncio.run(result)
        require_none(result)
        return True

    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        left = set(item.listchain()) - set(nextitem.listchain() if nextitem else [])
        self.ended = [other for other in self.items if left & set(other.listchain())]
        self.was_bad = self.program.is_bad

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed or hasattr(report, "wasxfail"):
            self.failed.append(report.when)
            is_expected = "it is expected to fail, so that it decides nothing" if hasattr(report, "wasxfail") else ""
            self.detail = self.detail or is_expected or report.longreprtext[-MAX_DETAIL:] or report.outcome
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


def require_none(result: Any) -> None:
    """Fail a test that returns something: a comparison, or a generator or coroutine that nothing would run."""
    if result is not None:
        raise TypeError(f"the test returns a {type(result).__name__}, which nothing reads or runs; use assert")


def call_method(_: Any, method: Any) -> None:
    """Call a test of a plain TestCase, which would throw away whatever it returns."""
    require_none(method())


def main() -> None:
    wire = Wire()
    sys.path.insert(0, "")
    wire.tell({"bytecode": importlib.util.MAGIC_NUMBER.hex()})
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
        pytest.main([*OPTIONS, *order["files"]], plugins=[reporter])
    if not reporter.is_listed:
        error = reporter.error
        why = "".join(traceback.format_exception_only(type(error), error) if error else said.getvalue()[-MAX_DETAIL:])
        # A missing module is the tests' own fault; an assertion may fail because of a value that the program gave.
        is_missing = isinstance(error, (ImportError, SyntaxError)) and not program.has_told
        is_independent = not program.has_answered or is_missing
        wire.tell({"broken": program.unjudged or why.strip(), "is_ours": is_independent and not program.has_failed})


if __name__ == "__main__":
    main()
