"""Reading decoded JSON strictly: a field that is missing, of the wrong type or unknown is an error, never a default.

Knows nothing of what the fields mean. Every message names the field and the value received.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar, cast

import orjson

from areal_agent.types import JsonObject

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class WireError(ValueError):
    """A body that the wire does not carry."""


def decode_json(data: bytes) -> object:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WireError(f"{data[:80]!r} is not JSON: {error}") from error


def as_object(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise WireError(f"{where} is {value!r:.80}; it must be a JSON object")
    return cast(JsonObject, value)


def refuse_unknown(fields: JsonObject, known: set[str], where: str) -> None:
    unknown = sorted(set(fields) - known)
    if unknown:
        raise WireError(f"{where} does not take {unknown[0]!r}; it takes {', '.join(sorted(known))}")


def get(fields: JsonObject, name: str, kind: type[T]) -> T:
    value = fields.get(name)
    if not isinstance(value, kind):
        found = f"{value!r:.80}" if name in fields else "missing"
        raise WireError(f"{name} is {found}; it must be a {kind.__name__}")
    return value


def as_ids(values: Sequence[Any], name: str) -> tuple[int, ...]:
    if set(map(type, values)) - {int}:  # no isinstance: a boolean is no id
        wrong = next(value for value in values if type(value) is not int)
        raise WireError(f"{name} holds {wrong!r:.80}; it must hold integers only")
    return tuple(values)


def as_integer(value: object, name: str) -> int:
    if type(value) is not int:
        raise WireError(f"{name} is {value!r:.80}; it must be an integer")
    return value


def as_number(value: object, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(cast(float, value)):
        raise WireError(f"{name} is {value!r:.80}; it must be a finite number")
    return float(cast(float, value))


def as_numbers(values: Sequence[Any], name: str) -> tuple[float, ...]:
    """`as_number` of each, at a third of its cost when all are well."""
    if set(map(type, values)) - {int, float} or not all(map(math.isfinite, values)):
        return tuple(as_number(value, name) for value in values)  # raises, and names the value
    return tuple(map(float, values))


def as_member(kind: type[E], value: object, name: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise WireError(f"{name} is {value!r:.80}; it must be one of {', '.join(kind)}") from None
