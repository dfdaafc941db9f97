"""Plain data as JSON and back: the values that may pass between a judged program and its tests.

These are None, booleans, numbers, text, bytes, the built-in containers, and those types of the standard library that
`PARTS` names. Types are exact: an instance of a subclass could pretend to be anything, so it is not plain data. An
object of the program passes only as its key.
"""

import importlib
from collections.abc import Callable
from typing import Any

SCALARS = (type(None), bool, int, float, str)
MAX_BITS = 10_000
"""Longer whole numbers travel in hexadecimal: Python bounds the digits of others, which also take long to read."""
DATE = ("year", "month", "day")
TIME = ("hour", "minute", "second", "microsecond")
PARTS: dict[str, Callable[[Any], list[Any]]] = {  # the arguments that make such a value again
    **dict.fromkeys(("builtins.tuple", "builtins.set", "builtins.frozenset"), lambda value: [[*value]]),
    **dict.fromkeys(("collections.deque", "builtins.bytearray"), lambda value: [[*value]]),
    **dict.fromkeys(("collections.Counter", "collections.OrderedDict"), lambda value: [dict(value)]),
    "builtins.complex": lambda value: [value.real, value.imag],
    "builtins.slice": lambda value: [value.start, value.stop, value.step],
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "collections.defaultdict": lambda value: [None, dict(value)],
    "datetime.date": lambda value: [getattr(value, part) for part in DATE],
    "datetime.datetime": lambda value: [getattr(value, part) for part in DATE + TIME],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
}


def pack(value: Any, pack_object: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a value as JSON. `pack_object` turns anything that is not plain data into a dict of its own, or raises."""
    kind: type = type(value)
    if kind is int and value.bit_length() > MAX_BITS:
        return {"int": hex(value)}
    if kind in SCALARS:
        return value
    if kind is list:
        return [pack(item, pack_object) for item in value]
    if kind is dict:
        return {"dict": [[pack(key, pack_object), pack(item, pack_object)] for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": value.decode("latin-1")}
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in PARTS and not getattr(value, "tzinfo", None):
        return {name: pack(PARTS[name](value), pack_object)}
    return pack_object(value)


def unpack(data: Any, unpack_object: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value that `pack` packed. ValueError or TypeError for anything else."""
    if isinstance(data, list):
        return [unpack(item, unpack_object) for item in data]
    if not isinstance(data, dict):
        return data
    [(kind, content)] = data.items()
    if kind == "dict":
        return {unpack(key, unpack_object): unpack(item, unpack_object) for key, item in content}
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return content.encode("latin-1")
    if kind in PARTS:
        module, name = kind.split(".")
        return getattr(importlib.import_module(module), name)(*unpack(content, unpack_object))
    return unpack_object(data)
