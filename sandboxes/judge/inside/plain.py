"""Plain data as JSON and back: the values that may pass between a judged program and its tests.

These are None, booleans, numbers, text, bytes, lists, tuples, sets and dicts of these. Types are exact: an instance of
a subclass could pretend to be anything, so it is not plain data. An object of the program passes only as its key.
"""

from collections.abc import Callable
from typing import Any, cast

SCALARS = (type(None), bool, int, float, str)
SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
MAKERS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def pack(value: Any, pack_object: Callable[[Any], dict[str, Any]]) -> Any:
    """Return a value as JSON. `pack_object` turns anything that is not plain data into a dict of its own, or raises."""
    kind: type = type(value)
    if kind in SCALARS:
        return value
    if kind is list:
        return [pack(item, pack_object) for item in value]
    if kind is dict:
        return {"dict": [[pack(key, pack_object), pack(item, pack_object)] for key, item in value.items()]}
    if kind in SEQUENCES:
        return {SEQUENCES[kind]: [pack(item, pack_object) for item in value]}
    if kind is bytes:
        return {"bytes": value.decode("latin-1")}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    return pack_object(value)


def unpack(data: Any, unpack_object: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value that `pack` packed. ValueError or TypeError for anything else."""
    if isinstance(data, list):
        return [unpack(item, unpack_object) for item in cast(list[Any], data)]
    if not isinstance(data, dict):
        return data
    parts = cast(dict[str, Any], data)
    [(kind, content)] = parts.items()
    if kind == "dict":
        return {unpack(key, unpack_object): unpack(item, unpack_object) for key, item in content}
    if kind in MAKERS:
        return MAKERS[kind]([unpack(item, unpack_object) for item in content])
    if kind == "bytes":
        return content.encode("latin-1")
    if kind == "complex":
        return complex(*content)
    return unpack_object(parts)
