"""Holds a program and does with it what its tests ask, one request per line. It runs in the program's own process.

    {"code": ..., "module": ..., "serial": ...} ─▶ {"names": {name: kind}}    or {"raised": ...}
    {"do": ..., "on": ..., "args": [...]} ─▶ {"value": ...}                   or {"raised": ...}, {"gone": ...}

`on` is the key of an object: its name in the program or, for one that the program made, a number that includes the
serial of this process. The key of an object of an earlier process is `gone`. What the program prints goes to stderr.
"""

import builtins
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

from sandboxes.judge.inside.call import load
from sandboxes.judge.inside.plain import pack, unpack

MAX_ITEMS = 1_000_000
MAX_MESSAGE = 2_000


class Gone(Exception):
    """The object belongs to an earlier process."""


class Objects:
    """The objects that the program made, by key. They live as long as this process."""

    def __init__(self, names: dict[str, Any], serial: int) -> None:
        self._serial = serial
        self._by_key = dict(names)
        self._keys = {id(value): name for name, value in names.items()}

    def __getitem__(self, key: str) -> Any:
        try:
            return self._by_key[key]
        except KeyError:
            raise Gone from None

    def pack(self, value: Any) -> dict[str, Any]:
        if id(value) not in self._keys:
            key = self._keys[id(value)] = f"{self._serial}.{len(self._by_key)}"
            self._by_key[key] = value
        return {"object": [self._keys[id(value)], type(value).__name__]}

    def unpack(self, parts: dict[str, Any]) -> Any:
        return self[parts["object"][0]]


def kind_of(value: Any) -> tuple[str, list[str]]:
    """Return what kind of thing a name is, and for an exception the built-in ones that it derives from."""
    if not isinstance(value, type):
        return "object", []
    if not issubclass(value, BaseException):
        return "class", []
    return "exception", [kind.__name__ for kind in value.__mro__ if getattr(builtins, kind.__name__, None) is kind]


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


def items(target: Any) -> list[Any]:
    return list(itertools.islice(target, MAX_ITEMS))


ACTS: dict[str, Callable[..., Any]] = {
    "get": getattr, "set": setattr, "call": call, "len": len, "truth": bool, "str": str, "repr": repr,
    "item": operator.getitem, "set_item": operator.setitem, "delete_item": operator.delitem,
    "items": items, "next": next,
}  # fmt: skip


def described(error: BaseException) -> dict[str, Any]:
    """Describe an exception by its class names, most specific first, and its message."""
    try:
        message = str(error)[:MAX_MESSAGE]
    except BaseException:  # the boundary: the program's own code fails here
        message = ""
    return {"names": [kind.__name__ for kind in type(error).__mro__], "message": message}


def answers(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Answer each request, whatever the program does."""
    first = json.loads(next(requests))
    try:
        module = load(first["code"], first["module"])
    except BaseException as error:  # the boundary: what a program raises, SystemExit too, is an answer
        yield {"raised": described(error)}
        return
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    objects = Objects({"": module, **names}, first["serial"])
    yield {"names": {name: kind_of(value) for name, value in names.items()}}
    for line in requests:
        try:
            request = json.loads(line)
            args = unpack(request["args"], objects.unpack)
            yield {"value": pack(ACTS[request["do"]](objects[request["on"]], *args), objects.pack)}
        except Gone:
            yield {"gone": "the object was made by a process that has died"}
        except BaseException as error:
            yield {"raised": described(error)}


def main() -> None:
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for answer in answers(requests):
        try:
            text = json.dumps(answer)
        except ValueError as error:  # an integer with too many digits to be written
            text = json.dumps({"raised": described(error)})
        replies.write(f"{text}\n")
        replies.flush()


if __name__ == "__main__":
    main()
