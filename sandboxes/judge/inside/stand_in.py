"""The stand-in for a program in another sandbox: a module whose functions and objects send on what is asked of them.

It runs where the tests run, and only plain data of the program comes here. An object of the program only equals itself,
and `in` compares its items one by one here: the program is never asked about equality.
"""

import builtins
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from sandboxes.judge.inside.plain import pack, unpack

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

    def missing(self, name: str) -> NoReturn:
        self.has_failed = True
        raise AttributeError(f"the program defines no {name!r}")

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


class RemoteObject:
    """An object of the program. It is compared by identity, never by what it says."""

    _remote: tuple[Program, str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return remote(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        remote(self, "set", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return remote(self, "call", args, kwargs)

    def __len__(self) -> int:
        return remote(self, "len")

    def __bool__(self) -> bool:
        return remote(self, "truth")

    def __str__(self) -> str:
        return remote(self, "str")

    def __repr__(self) -> str:
        return remote(self, "repr")

    def __getitem__(self, key: Any) -> Any:
        return remote(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        remote(self, "set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        remote(self, "delete_item", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(remote(self, "items"))

    def __next__(self) -> Any:
        return remote(self, "next")


def remote(target: RemoteObject, act: str, *args: Any) -> Any:
    program, key = object.__getattribute__(target, "_remote")
    return program.do(act, key, *args)


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
        return program.do("get", "", key) if key in names else program.missing(key)

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
