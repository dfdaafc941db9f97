"""Runs the unit tests of a program that is in another sandbox, and reports how each ends, one message per line.

    ─▶ {"module": ..., "files": [...], "names": {...}}    the program's names, as serve_program.py gives them
    ◀─ {"tests": [name, ...]}, or {"broken": why, "is_ours": whether the program had no part in it}
    ◀─ {"start": index}
    ◀─ {"do": ...}  ─▶ {"value": ...} | {"raised": ...} | {"gone": why}        any number of times
    ◀─ {"end": index, "is_passed": ..., "detail": ...}, or {"refused": why}
    ◀─ {"done": true}

Tests are unittest classes, plain classes `Test*` and functions `test_*`. A test that skips itself while it runs fails.

In place of the program they import a stand-in: a module whose functions and objects send on what is asked of them. Only
plain data of the program comes here. An object of the program only equals itself, and `in` compares its items one by
one here: the program is never asked about equality.
"""

import builtins
import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

from sandboxes.judge.inside.plain import pack, unpack

MAX_DETAIL = 2_000
Ask = Callable[[dict[str, Any]], dict[str, Any]]


class ProgramGone(BaseException):
    """The program died or was killed. Not an Exception, so that no test expects it."""


class CannotBeJudged(BaseException):
    """A test asks for something that cannot be had of a program in another sandbox."""


class Program:
    """The connection to the program: `do` something with one of its objects, by key; the module's key is empty."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._objects: dict[str, RemoteObject] = {}
        self.classes: dict[str, type[RemoteObject]] = {}
        self.exceptions: dict[str, type[BaseException]] = {}
        self.has_failed = False  # whether it has raised, died, or lacked a name that a test asked for
        self.has_answered = False  # whether anything here may depend on its answers
        self.is_gone = False  # whether it has died since this was last set to False
        self.refused = ""  # why its tests cannot be judged

    def do(self, act: str, key: str, *args: Any) -> Any:
        reply = self._ask({"do": act, "on": key, "args": [pack(arg, self._pack) for arg in args]})
        self.has_answered = True
        if "value" in reply:
            return unpack(reply["value"], self._unpack)
        self.has_failed = True
        if "raised" in reply:
            raise self._exception(reply["raised"])
        self.is_gone = True
        raise ProgramGone(reply["gone"])

    def _pack(self, value: Any) -> dict[str, Any]:
        """Pack what is not plain data.

        Tests can hand back whatever the program defines a name as; otherwise a program could have its tests refused.
        """
        if any(value is known for known in (*self.classes.values(), *self.exceptions.values())):
            return {"object": [value.__name__]}
        if self.exceptions.get(type(value).__name__) is type(value):  # made here: the program makes its own
            value = self.do("call", type(value).__name__, value.args, {})
            if not isinstance(value, RemoteObject):
                raise TypeError("the program makes no object of its own exception")
        if not isinstance(value, RemoteObject):
            self.refused = f"a test hands an object of type {type(value).__name__!r} to the program: no plain data"
            raise CannotBeJudged(self.refused)
        _, key = object.__getattribute__(value, "_remote")
        return {"object": [key]}

    def _unpack(self, parts: dict[str, Any]) -> Any:
        key, class_name = parts["object"]
        if key not in self._objects:
            made = object.__new__(self.classes.get(class_name, RemoteObject))
            object.__setattr__(made, "_remote", (self, key))
            self._objects[key] = made
        return self._objects[key]

    def _exception(self, raised: dict[str, Any]) -> BaseException:
        """Return the nearest known exception; a program cannot raise one that would end or skip a test."""
        for name in raised["names"]:
            kind = self.exceptions.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and (kind is SystemExit or issubclass(kind, Exception)):
                return exception_from(kind, raised["message"])
        return RuntimeError(raised["message"])


def exception_from(kind: type[BaseException], message: str) -> BaseException:
    try:
        return kind(message)
    except TypeError:  # a type with other arguments, such as UnicodeDecodeError
        error = kind.__new__(kind)
        error.args = (message,)
        return error


def remote(target: "RemoteObject", act: str, *args: Any) -> Any:
    program, key = object.__getattribute__(target, "_remote")
    return program.do(act, key, *args)


def sends(act: str) -> Any:
    """Return a method that has the program do this."""

    def method(self: "RemoteObject", *args: Any) -> Any:
        return remote(self, act, *args)

    return method


class RemoteObject:
    """An object of the program. It is compared by identity, never by what it says."""

    _remote: tuple[Program, str]

    __setattr__ = sends("set")
    __len__ = sends("len")
    __bool__ = sends("truth")
    __str__ = sends("str")
    __repr__ = sends("repr")
    __getitem__ = sends("item")
    __setitem__ = sends("set_item")
    __delitem__ = sends("delete_item")
    __next__ = sends("next")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return remote(self, "get", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return remote(self, "call", args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(remote(self, "items"))


def stand_in(name: str, program: Program, names: dict[str, Any]) -> types.ModuleType:
    """Return the module that tests import instead of the program."""
    module = types.ModuleType(name)
    names = {key: value for key, value in names.items() if key.isidentifier() and not key.startswith("__")}
    for key, (kind, bases) in names.items():
        if kind == "class":
            program.classes[key] = class_of(key, program)
        elif kind == "exception":
            program.exceptions[key] = exception_of(key, bases)
    module.__dict__.update(program.exceptions)
    module.__dict__.update(program.classes)
    module.__dict__["__all__"] = [key for key in names if not key.startswith("_")]

    def attribute(key: str) -> Any:
        if key in names:
            return program.do("get", "", key)
        program.has_failed = True
        raise AttributeError(f"the program defines no {key!r}")

    module.__dict__["__getattr__"] = attribute
    return module


def class_of(name: str, program: Program) -> type[RemoteObject]:
    """Return a class whose calls make objects of the program, and whose attributes are those of the program's class."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return program.do("call", name, args, kwargs)

        def __getattr__(cls, key: str) -> Any:
            return program.do("get", name, key)

    return Meta(name, (RemoteObject,), {})


def exception_of(name: str, bases: list[str]) -> type[BaseException]:
    known = [getattr(builtins, base, None) for base in bases]
    found = next((kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)), Exception)
    return type(name, (found,), {})


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


def judged(suite: unittest.TestSuite, tests: list[unittest.TestCase]) -> unittest.TestSuite:
    """Return the suite of the tests that count, those not marked to be skipped, and add these to `tests`.

    They stay in the suites of their classes, which set up and tear down what a class or module shares.
    """
    kept = unittest.TestSuite()
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            kept.addTest(judged(test, tests))
        elif not marked(test, "__unittest_skip__"):
            if marked(test, "__unittest_expecting_failure__"):
                raise Refused(f"{test.id()} is expected to fail; what passes it cannot be told from what does not")
            kept.addTest(test)
            tests.append(test)
    return kept


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
        tests: list[unittest.TestCase] = []
        suite = judged(unittest.TestSuite(suite_of(load(path)) for path in order["files"]), tests)
    except BaseException as error:  # the boundary: test files are foreign code
        why = "".join(traceback.format_exception_only(error)).strip()
        # A missing module is the tests' own fault; an assertion may fail because of a value that the program gave.
        is_independent = not program.has_answered or isinstance(error, ImportError | SyntaxError)
        is_ours = bool(program.refused) or (is_independent and not program.has_failed)
        wire.tell({"broken": program.refused or why, "is_ours": is_ours})
        return
    wire.tell({"tests": [test.id().rpartition(".")[2] for test in tests]})
    suite.run(ToldResult(wire, program, tests))
    wire.tell({"done": True})


if __name__ == "__main__":
    main()
