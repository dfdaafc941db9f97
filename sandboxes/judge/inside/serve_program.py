"""Holds a program and does with it what its tests ask, one request per line. It runs in the program's own process.

    {"code": ..., "module": ..., "serial": ...} ─▶ {"names": {name: kind}}
    {"do": ..., "on": ..., "args": [...]} ─▶ {"value": ...}, {"raised": ...}, {"gone": ...}

A program that cannot be loaded ends this process, with its traceback on stderr.
`on` is the key of an object: its name in the program or among the built-in names or, for one that the program made, a
number that includes the serial of this process. The key of an object of an earlier process is `gone`. What the program
writes to `sys.stdout` is `printed` in the reply; the rest of its output goes to stderr.
"""

import builtins
import io
import itertools
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sandboxes.judge.inside.call import load
from sandboxes.judge.inside.plain import pack, unpack

MAX_MESSAGE = 2_000
MAX_PRINTED = 65_536


class Gone(Exception):
    """The object belongs to an earlier process."""


class Objects:
    """The objects that the program made, by key. They live as long as this process."""

    def __init__(self, names: dict[str, Any], serial: int) -> None:
        self._serial = serial
        self._by_key = dict(names)
        self._keys = {id(value): name for name, value in names.items()}

    def __getitem__(self, key: str) -> Any:
        found = self._by_key.get(key, self)
        if found is self and (found := getattr(builtins, key, self)) is self:
            raise Gone
        return found

    def pack(self, value: Any) -> dict[str, Any]:
        if id(value) not in self._keys:
            key = self._keys[id(value)] = f"{self._serial}.{len(self._by_key)}"
            self._by_key[key] = value
        return {"object": [self._keys[id(value)], type(value).__name__]}

    def unpack(self, parts: dict[str, Any]) -> Any:
        return self[parts["object"][0]]


def kind_of(value: Any) -> tuple[str, list[str]]:
    """Return what kind of thing a name is, and of a class the names of its ancestors."""
    if not isinstance(value, type):
        return "object", []
    kind = "exception" if issubclass(value, BaseException) else "class"
    return kind, [ancestor.__name__ for ancestor in value.__mro__[1:-1]]


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


def some(target: Any, size: int) -> list[Any]:
    return list(itertools.islice(target, size))


def run(awaitable: Any) -> Any:
    """Run what a test awaits, in one event loop for all of them."""
    import asyncio  # here, since few programs need it and it takes long

    global loop
    loop = loop or asyncio.new_event_loop()

    async def awaiting() -> Any:
        return await awaitable

    return loop.run_until_complete(awaiting())


loop: Any = None


def act_of(name: str) -> Callable[..., Any]:
    """Return what an act does: it is named like a function of this file, of `operator`, or a built-in one."""
    return (
        {"call": call, "some": some, "run": run}.get(name) or getattr(operator, name, None) or getattr(builtins, name)
    )


def described(error: BaseException, pack_object: Callable[[Any], Any]) -> dict[str, Any]:
    """Describe an exception by its class names, most specific first, its message, arguments and attributes."""
    message, args, attributes = "", [], {}
    try:
        message = str(error)[:MAX_MESSAGE]
        args = pack(list(error.args), pack_object)
        attributes = pack({**vars(error)}, pack_object)
    except BaseException:  # the boundary: the program's own code fails here
        args = [message]
    names = [kind.__name__ for kind in type(error).__mro__]
    return {"names": names, "message": message, "args": args, "attributes": attributes}


def answers(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Answer each request, whatever the program does."""
    first = json.loads(next(requests))
    module = load(first["code"], first["module"])
    names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    objects = Objects({"": module, **names}, first["serial"])
    yield {"names": {name: kind_of(value) for name, value in names.items()}}
    for line in requests:
        try:
            request = json.loads(line)
            args = unpack(request["args"], objects.unpack)
            yield {"value": pack(act_of(request["do"])(objects[request["on"]], *args), objects.pack)}
        except Gone:
            yield {"gone": "the object was made by a process that has died"}
        except BaseException as error:  # the boundary: what a program raises, SystemExit too, is an answer
            yield {"raised": described(error, objects.pack)}


def main() -> None:
    requests = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    printed = io.BytesIO()
    sys.stdout = io.TextIOWrapper(printed, "utf-8", "backslashreplace", write_through=True)
    for answer in answers(requests):
        if data := printed.getvalue():
            answer["printed"] = data[:MAX_PRINTED].decode(errors="replace")
            printed.seek(0)
            printed.truncate()
        replies.write(f"{json.dumps(answer)}\n")
        replies.flush()


if __name__ == "__main__":
    main()
