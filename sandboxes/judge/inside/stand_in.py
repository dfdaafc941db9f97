"""The module that tests import in place of the program: it sends on what is asked of the program's objects.

Only plain data of the program comes to the tests' process. An object of the program stays where it is and is known by
its key. What a test asks of it (an attribute, a call, its length, its items) the program answers, as with the result of
a plain function. Whether its object equals another, is less, or what it gives with a value of the test is not asked:
that would have the program judge itself, so the test fails with the reason. Each answer makes a new stand-in, so that
two of them are never identical: lists of them would otherwise be equal without being compared.
"""

import builtins
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from sandboxes.judge.inside.plain import pack, unpack

PROBED = ("__", "_mock", "_pytest", "pytest")
"""Beginnings of names that Python and pytest look for in any object. The program is not asked for them."""
SENT = (
    *("delattr", "delitem", "getitem", "hash", "len", "next", "repr", "setattr", "setitem", "str"),
    *("abs", "float", "index", "int", "invert", "neg", "pos", "round"),
)
OPERATORS = (
    *("add", "and_", "floordiv", "lshift", "matmul", "mod", "mul"),
    *("or_", "pow", "rshift", "sub", "truediv", "xor"),
)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
EXACT_ITEMS, MANY_ITEMS = 64, 1024
"""An iterator of the program is asked for one item at a time, as its tests see what it does; later for many."""
Ask = Callable[[dict[str, Any]], dict[str, Any]]


class ProgramGone(BaseException):
    """The program died or was killed. Not an Exception, so that no test expects it."""


class CannotBeJudged(BaseException):
    """A test asks for something that cannot be had of a program in another sandbox."""


class Program:
    """The connection to the program: `do` something with one of its objects, by key; the module's key is empty."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.classes: dict[str, type[Any]] = {}
        self.has_answered = False  # whether anything here may depend on its answers
        self.has_told = False  # whether plain data of it is here, or an exception
        self.has_failed = False  # whether it has raised, died, or lacked a name that a test asked for
        self.is_gone = False  # whether it has died since this was last set to False
        self.unjudged = ""  # the reason why the running test cannot be judged

    @property
    def is_bad(self) -> bool:
        return self.is_gone or bool(self.unjudged)

    def do(self, act: str, key: str, *args: Any) -> Any:
        reply = self._ask({"do": act, "on": key, "args": [pack(arg, self._pack) for arg in args]})
        self.has_answered = True
        sys.stdout.write(str(reply.get("printed", "")))
        value = unpack(reply["value"], self._unpack) if "value" in reply else None
        self.has_told = self.has_told or not isinstance(value, RemoteObject)
        if "value" in reply:
            return value
        self.has_failed = True
        if "raised" in reply:
            raise self._exception(reply["raised"], act)
        self.is_gone = True
        raise ProgramGone(reply.get("gone", "its answer is none"))

    def cannot(self, reason: str) -> CannotBeJudged:
        """Return the exception for what cannot be judged; the test fails even if it catches that."""
        self.unjudged = self.unjudged or reason
        return CannotBeJudged(reason)

    def _pack(self, value: Any) -> dict[str, Any]:
        """Pack what is not plain data: what the program has too, by its name or key."""
        if self._has_too(value):
            return {"object": [value.__name__]}
        if isinstance(value, BaseException) and self._has_too(type(value)):
            value = self.do("call", type(value).__name__, value.args, {})
        if isinstance(value, RemoteObject):
            return {"object": [object.__getattribute__(value, "_remote")[1]]}
        raise self.cannot(f"a test hands an object of type {type(value).__name__!r} to the program: no plain data")

    def _has_too(self, value: Any) -> bool:
        """Return whether this is a class of the program, or built in."""
        name = getattr(value, "__name__", "")
        return value is self.classes.get(name, self) or value is getattr(builtins, name, self)

    def _unpack(self, parts: dict[str, Any]) -> Any:
        key, class_name = parts["object"]
        kind = self.classes.get(class_name, RemoteObject)
        made = object.__new__(kind if issubclass(kind, RemoteObject) else RemoteObject)
        object.__setattr__(made, "_remote", (self, key))
        return made

    def _exception(self, raised: dict[str, Any], act: str) -> BaseException:
        """Return the nearest known exception; a program cannot raise one that would end a test, or a loop in it."""
        for name in raised["names"]:
            kind: Any = self.classes.get(name) or getattr(builtins, name, None)
            if isinstance(kind, type) and (kind is SystemExit or issubclass(kind, Exception)):
                break
        else:
            kind = RuntimeError
        ends_thread_alone = kind is SystemExit and threading.current_thread() is not threading.main_thread()
        if (issubclass(kind, StopIteration) and act != "next") or ends_thread_alone:
            return RuntimeError(f"the program raised {kind.__name__}")
        try:
            error = kind(*unpack(raised["args"], self._unpack))
        except Exception:  # an exception of another make
            return RuntimeError(raised["message"])
        vars(error).update(unpack(raised["attributes"], self._unpack), _message=raised["message"])
        return error


def remote(target: Any, act: str, *args: Any) -> Any:
    program, key = target._remote
    return program.do(act, key, *args)


def sends(act: str) -> Any:
    """Return a method that has the program do this."""

    def method(self: Any, *args: Any) -> Any:
        return remote(self, act, *args)

    return method


def judges(act: str) -> Any:
    """Return a method for an operator by which the program would judge itself, with the exceptions."""

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, RemoteObject) and act in OPERATORS:
            return remote(self, act, other)
        if other is None and act in ("eq", "ne"):
            return act == "ne"
        raise self._remote[0].cannot(
            f"a test compares an object of the program, or takes it together with a value of its own ({act}): the "
            "program would judge itself; compare plain data, such as vars(it), an attribute, or what a method returns"
        )

    return method


class RemoteObject:
    """An object of the program."""

    _remote: tuple[Program, str]

    __dict__ = property(sends("vars"))  # pyright: ignore[reportAssignmentType]
    __bool__ = sends("truth")
    for _act in SENT:
        locals()[f"__{_act}__"] = sends(_act)
    for _act in (*OPERATORS, *COMPARISONS):
        locals()[f"__{_act.strip('_')}__"] = locals()[f"__r{_act.strip('_')}__"] = judges(_act)
    del _act  # pyright: ignore[reportPossiblyUnboundVariable]

    def __init_subclass__(cls) -> None:
        if "_remote" not in vars(cls):
            raise cls._remote[0].cannot("a test derives a class from one of the program, which is in another sandbox")

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PROBED):
            raise AttributeError(name)
        return remote(self, "getattr", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return remote(self, "call", args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        iterator, size, num_given = remote(self, "iter"), 1, 0
        while len(items := remote(iterator, "some", size)) == size:
            yield from items
            num_given += size
            size = 1 if num_given < EXACT_ITEMS else MANY_ITEMS
        yield from items

    def __enter__(self) -> Any:
        return remote(self, "getattr", "__enter__")()

    def __exit__(self, kind: Any, error: Any, _frames: object) -> bool:
        return hides(self, remote(self, "getattr", "__exit__")(kind, error, None), error)

    def __await__(self) -> Generator[None, None, Any]:
        return remote(self, "run")
        yield

    async def __aenter__(self) -> Any:
        return await remote(self, "getattr", "__aenter__")()

    async def __aexit__(self, kind: Any, error: Any, _frames: object) -> bool:
        return hides(self, await remote(self, "getattr", "__aexit__")(kind, error, None), error)

    def __aiter__(self) -> Any:
        return remote(self, "getattr", "__aiter__")()

    async def __anext__(self) -> Any:
        return await remote(self, "getattr", "__anext__")()


def hides(target: Any, answer: Any, error: Any) -> bool:
    """Return False: a program that hides an error of a `with` block hides the checks that come after it there."""
    if answer is True and error is not None:
        raise target._remote[0].cannot(
            "the program hides an error that was raised in a `with` block of the test, and with it what the block "
            "checks; expect the error in the test"
        )
    return False


class RemoteClass(type):
    """A class of the program: its calls make objects there."""

    __getattr__ = RemoteObject.__getattr__
    __call__ = RemoteObject.__call__  # pyright: ignore[reportAssignmentType]
    __iter__ = RemoteObject.__iter__  # of an enumeration
    __len__ = sends("len")
    __getitem__ = sends("getitem")

    def __bool__(cls) -> bool:
        return True

    def __setattr__(cls, name: str, value: Any) -> None:
        if not name.startswith(PROBED):
            raise cls._remote[0].cannot(f"a test sets {name!r} in {cls.__name__}, which is in another sandbox")
        super().__setattr__(name, value)


class StandIn(types.ModuleType):
    """The module. What a test sets in it would not reach the program."""

    def __init__(self, name: str, program: Program, names: dict[str, Any]) -> None:
        super().__init__(name)
        names = {key: value for key, value in names.items() if key.isidentifier() and not key.startswith("__")}
        lineages = {key: {key, *ancestors} for key, (_, ancestors) in names.items()}
        for key, (kind, ancestors) in sorted(names.items(), key=lambda item: len(item[1][1])):  # ancestors come first
            if kind != "object":
                is_true = all(lineages[one] <= lineages[key] for one in ancestors if one in lineages)
                program.classes[key] = class_of(key, kind, ancestors if is_true else [], program)
        vars(self).update(_program=program, _names=frozenset(names))

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            raise self._program.cannot("a test takes all names of the program (*), even `abs`; import them one by one")
        self._program.has_answered = self._program.has_answered or not name.startswith(PROBED)
        if name in self._names:
            return self._program.classes.get(name) or self._program.do("getattr", "", name)
        self._program.has_failed = self._program.has_failed or not name.startswith(PROBED)
        raise AttributeError(f"the program defines no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith(PROBED):
            raise self._program.cannot(f"a test sets {name!r} in the program, which is in another sandbox")
        super().__setattr__(name, value)


def class_of(name: str, kind: str, ancestors: list[str], program: Program) -> type[Any]:
    """Return a class that derives from the ancestors that are known here, for `isinstance` and `except`."""
    known = [program.classes.get(ancestor) or getattr(builtins, ancestor, None) for ancestor in ancestors]
    if kind == "exception":
        make, content, last = type, {"__str__": message_of}, Exception
        found = [one for one in known if isinstance(one, type) and issubclass(one, Exception)]
    else:
        make, content, last = RemoteClass, {"_remote": (program, name)}, RemoteObject
        found = [one for one in known if isinstance(one, RemoteClass)]
    try:
        return make(name, tuple(found) or (last,), content)
    except TypeError:  # the program reports ancestors that no class has
        return make(name, (last,), content)


def message_of(error: BaseException) -> str:
    return str(vars(error).get("_message", error.args))
