"""The module that tests import in place of the program: it sends on what is asked of the program's objects.

Only plain data of the program comes to the tests' process. An object of the program stays where it is and is known by
its key. What a test asks of it (an attribute, a call, its length, its items) is answered by the program, as a plain
function's result is. What would let the program be the judge of its own result fails the test, with the reason: whether
its object equals another or is less, and arithmetic with a value of the test. Each answer makes a new stand-in, so that
two of them are never identical: a list of them would otherwise equal another without being compared.
"""

import builtins
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from sandboxes.judge.inside.plain import BINARY, UNARY, pack, unpack

PROBED = ("__", "_mock", "_pytest", "pytest")
"""Beginnings of names that Python and pytest look for in any object. The program is not asked for them."""
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
        self.has_failed = False  # whether it has raised, died, or lacked a name that a test asked for
        self.has_told = False  # whether it has given plain data, by which tests may choose what they test
        self.new_test()

    def new_test(self) -> None:
        self.is_gone = False  # whether it has died since
        self.unjudged = ""  # the reason why a test cannot be judged

    @property
    def is_bad(self) -> bool:
        return self.is_gone or bool(self.unjudged)

    def do(self, act: str, key: str, *args: Any) -> Any:
        reply = self._ask({"do": act, "on": key, "args": [pack(arg, self._pack) for arg in args]})
        self.has_answered = True
        sys.stdout.write(str(reply.get("printed", "")))
        if "value" in reply:
            value = unpack(reply["value"], self._unpack)
            self.has_told = self.has_told or not isinstance(value, RemoteObject)
            return value
        self.has_failed = self.has_told = True
        if "raised" in reply:
            raise self._exception(reply["raised"])
        self.is_gone = True
        raise ProgramGone(reply.get("gone", "what it answered is no answer"))

    def cannot(self, reason: str) -> CannotBeJudged:
        """Return the exception for what cannot be judged; the test fails even if it catches that."""
        self.unjudged = self.unjudged or reason
        return CannotBeJudged(reason)

    def _pack(self, value: Any) -> dict[str, Any]:
        """Pack what is not plain data: what the program has too, by its name or key."""
        if isinstance(value, BaseException) and self._has_too(type(value)):
            value = self.do("call", type(value).__name__, value.args, {})
        if isinstance(value, RemoteObject):
            return {"object": [vars(value)["_remote"][1]]}
        if self._has_too(value):
            return {"object": [value.__name__]}
        raise self.cannot(f"a test hands an object of type {type(value).__name__!r} to the program: no plain data")

    def _has_too(self, value: Any) -> bool:
        """Return whether this is a class of the program, or built in."""
        name = getattr(value, "__name__", "")
        return value is not None and value in (self.classes.get(name), getattr(builtins, name, None))

    def _unpack(self, parts: dict[str, Any]) -> Any:
        key, class_name = parts["object"]
        kind = self.classes.get(class_name, RemoteObject)
        made = object.__new__(kind if issubclass(kind, RemoteObject) else RemoteObject)
        object.__setattr__(made, "_remote", (self, key))
        return made

    def _exception(self, raised: dict[str, Any]) -> BaseException:
        """Return the nearest known exception; a program cannot raise one that would end or skip a test."""
        kinds = (self.classes.get(name) or getattr(builtins, name, None) for name in raised["names"])
        kind = next((kind for kind in kinds if may_be_raised(kind)), RuntimeError)
        try:
            error = kind(*unpack(raised["args"], self._unpack))
        except Exception:  # an exception of another make
            return RuntimeError(raised["message"])
        error.__dict__.update(unpack(raised["attributes"], self._unpack), _message=raised["message"])
        return error


def may_be_raised(kind: Any) -> bool:
    return isinstance(kind, type) and (kind is SystemExit or issubclass(kind, Exception))


def remote(target: Any, act: str, *args: Any) -> Any:
    program, key = vars(target)["_remote"]
    return program.do(act, key, *args)


def sends(act: str) -> Any:
    """Return a method that has the program do this."""
    return lambda self, *args: remote(self, act, *args)


def sends_operation(act: str) -> Any:
    """Return a method for an operator whose two sides must be objects of the program."""

    def method(self: "RemoteObject", other: Any) -> Any:
        if isinstance(other, RemoteObject):
            return remote(self, act, other)
        raise cannot(self, f"takes an object of the program and a value of its own together ({act.strip('_')})")

    return method


def refuses_comparison(sign: str) -> Any:
    """Return a method for a comparison; only whether an object is None is no question for the program."""

    def method(self: "RemoteObject", other: Any) -> bool:
        if other is None and sign in ("==", "!="):
            return sign == "!="
        raise cannot(self, f"compares an object of the program ({sign})")

    return method


def cannot(target: "RemoteObject", what: str) -> BaseException:
    return vars(target)["_remote"][0].cannot(
        f"a test {what}, and so lets the program judge itself; compare plain data: attributes, results of methods, text"
    )


class RemoteObject:
    """An object of the program."""

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
    __enter__ = sends("enter")
    for _name in UNARY:
        locals()[f"__{_name}__"] = sends(_name)
    for _name in BINARY:
        locals()[f"__{_name.strip('_')}__"] = locals()[f"__r{_name.strip('_')}__"] = sends_operation(_name)
    for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
        locals()[f"__{_name}__"] = refuses_comparison(_sign)

    def __hash__(self) -> int:
        return hash(vars(self)["_remote"][1])

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PROBED):
            raise AttributeError(name)
        return remote(self, "get", name)

    def __delattr__(self, name: str) -> None:
        remote(self, "delete", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return remote(self, "call", args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        size, num_given = 1, 0
        iterator = remote(self, "iter")
        while True:
            items = remote(iterator, "some", size)
            yield from items
            num_given += len(items)
            if len(items) < size:
                return
            size = 1 if num_given < EXACT_ITEMS else MANY_ITEMS

    def __exit__(self, _kind: object, error: "BaseException | None", _frames: object) -> bool:
        return remote(self, "exit", error) is True

    def __await__(self) -> Generator[None, None, Any]:
        return remote(self, "await")
        yield

    async def __aenter__(self) -> Any:
        return remote(self, "async_enter")

    async def __aexit__(self, _kind: object, error: "BaseException | None", _frames: object) -> bool:
        return remote(self, "async_exit", error) is True

    def __aiter__(self) -> "RemoteObject":
        return remote(self, "async_iter")

    async def __anext__(self) -> Any:
        return remote(self, "async_next")


class RemoteClass(type):
    """A class of the program: its calls make objects there."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_remote" not in vars(cls):
            raise cannot(cls, "derives a class from the program's")  # pyright: ignore[reportArgumentType]
        return remote(cls, "call", args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith(PROBED):
            raise AttributeError(name)
        return remote(cls, "get", name)

    def __iter__(cls) -> Iterator[Any]:  # of an enumeration
        return RemoteObject.__iter__(cls)  # pyright: ignore[reportArgumentType]

    __len__ = sends("len")
    __getitem__ = sends("item")

    def __bool__(cls) -> bool:
        return True


class StandIn(types.ModuleType):
    """The module. What a test sets in it would not reach the program."""

    def __init__(self, name: str, program: Program, names: dict[str, Any]) -> None:
        super().__init__(name)
        names = {key: value for key, value in names.items() if key.isidentifier() and not key.startswith("__")}
        for key, (kind, ancestors) in sorted(names.items(), key=lambda item: len(item[1][1])):  # ancestors come first
            if kind != "object":
                program.classes[key] = class_of(key, kind, ancestors, program)
        self.__dict__.update(program.classes, _program=program, _names=frozenset(names))

    def __getattr__(self, name: str) -> Any:
        if name.startswith(PROBED):
            raise AttributeError(name)
        if name in self._names:
            return self._program.do("get", "", name)
        self._program.has_failed = self._program.has_told = True
        raise AttributeError(f"the program defines no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith(PROBED):
            raise self._program.cannot(f"a test sets {name!r} in the program, which is in another sandbox")
        super().__setattr__(name, value)


def class_of(name: str, kind: str, ancestors: list[str], program: Program) -> type[Any]:
    """Return a class that derives from the ancestors that are known here, for `isinstance` and `except`."""
    known = [program.classes.get(ancestor) or getattr(builtins, ancestor, None) for ancestor in ancestors]
    if kind == "exception":
        make, content, last = type, {"__str__": lambda self: str(vars(self).get("_message", self.args))}, Exception
        found = [one for one in known if isinstance(one, type) and issubclass(one, Exception)]
    else:
        make, content, last = RemoteClass, {"_remote": (program, name)}, RemoteObject
        found = [one for one in known if isinstance(one, RemoteClass)]
    try:
        return make(name, tuple(found) or (last,), content)
    except TypeError:  # the program reports ancestors that no class has
        return make(name, (last,), content)
