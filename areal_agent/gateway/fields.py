"""Reading decoded JSON strictly: what is wrong is a `RequestError` that names the parameter and the value received.

Null means left out, as with OpenAI. Knows nothing of what the fields mean.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NoReturn, TypeVar, cast

from areal_agent.command import nearest
from areal_agent.errors import RequestError
from areal_agent.tokens.json_text import MAX_DEPTH, is_deeper
from areal_agent.types import MAX_REWARD, JsonObject

E = TypeVar("E", bound=StrEnum)


def refuse(param: str, value: object, must: str) -> NoReturn:
    """Raise the 400 that says what `param` must be."""
    raise RequestError(f"{param} is {value!r:.200}; it must be {must}", param=param, code="invalid_value")


def refuse_unknown(body: JsonObject, known: Iterable[str], where: str = "") -> None:
    """Raise for the first key that is not known and not null."""
    known = frozenset(known)
    for key in body.keys() - known:
        if body[key] is not None:
            raise RequestError(
                f"unknown parameter {where + key!r}; {nearest(key, known)}",
                param=where + key,
                code="unknown_parameter",
            )


def as_object(value: object, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(param, value, "a JSON object")
    return cast("dict[str, Any]", value)


def as_shallow_object(value: object, param: str) -> dict[str, Any]:
    """An object whose inside is nobody's business here, but which others will have to write and read."""
    if is_deeper(value):
        raise RequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param, code="invalid_value")
    return as_object(value, param)


def as_list(value: object, param: str) -> list[Any]:
    if not isinstance(value, list):
        refuse(param, value, "a list")
    return cast("list[Any]", value)


def as_text(value: object, param: str) -> str:
    if not isinstance(value, str):
        refuse(param, value, "a string")
    return value


def as_name(value: object, param: str) -> str:
    """A short string that is not empty."""
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        refuse(param, value, "a string of 1 to 256 characters")
    return value


def as_flag(value: object, param: str) -> bool:
    """True or false; null is false."""
    if value is not None and not isinstance(value, bool):
        refuse(param, value, "true or false")
    return value is True


def as_reward(value: object, param: str) -> float:
    """A number that a trainer can add up; true and false are 1 and 0."""
    if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        remedy = "; scale it down" if isinstance(value, int | float) else ""
        refuse(param, value, f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}, or a boolean{remedy}")
    return float(value)


def as_bounded_number(value: object, param: str, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(param, value, f"a number from {low:g} to {high:g}")
    return float(value)


def as_integer(value: object, param: str, *, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(param, value, f"an integer from {low} to {high}")
    return value


def as_member(kind: type[E], value: object, param: str) -> E:
    if not isinstance(value, str) or value not in list(kind):
        refuse(param, value, f"one of {', '.join(kind)}")
    return kind(value)
