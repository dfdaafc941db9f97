"""JSON objects inside text: the arguments of tool calls. Strict, and exact: integers keep all their digits."""

import json
import math
from typing import Any, NoReturn, cast

from areal_agent.types import JsonObject

MAX_DEPTH = 64
"""Deeper than this nobody nests on purpose, and not every reader of JSON can follow."""


def parse_json_object(text: str) -> dict[str, Any] | None:
    """The object that `text` is in JSON, or None when it is none: NaN, Infinity and lone surrogates are not JSON.

    >>> parse_json_object('{"x": 123456789012345678901}'), parse_json_object('{"x": NaN}')
    ({'x': 123456789012345678901}, None)
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if _is_good_object(value, text) else None


def json_object_at(text: str, begin: int) -> tuple[dict[str, Any], int] | None:
    """The object that begins there, and where it ends; None when none does.

    >>> json_object_at('x{"y": {}} z', 1), json_object_at('{"y": ', 0)
    (({'y': {}}, 10), None)
    """
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return (value, end) if _is_good_object(value, text) else None


def format_json(value: JsonObject) -> str:
    """As JSON text."""
    return _ENCODER.encode(value)


def is_deeper(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than `depth` levels deep.

    >>> is_deeper([[]], 2), is_deeper([[[]]], 2)
    (False, True)
    """
    if not isinstance(value, (dict, list)):
        return False
    if depth == 0:
        return True
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, (dict, list)) and is_deeper(child, depth - 1):  # asked here, too: a call costs more
            return True
    return False


def is_unicode(text: str) -> bool:
    """Whether there are whole characters only: no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_good_object(value: Any, text: str) -> bool:
    """`text`: what it was read from, or more of it."""
    if not isinstance(value, dict) or is_deeper(value):
        return False
    return is_unicode(format_json(cast("JsonObject", value)) if "\\u" in text else text)  # an escape may be half a one


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond every float")
    return number


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Made once: to make one costs more than to use it.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
