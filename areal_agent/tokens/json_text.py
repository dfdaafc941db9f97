"""JSON objects inside text: the arguments of tool calls. Strict, and exact: integers keep all their digits."""

import json
from typing import Any, NoReturn

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
        format_json(value).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not is_deeper(value) else None


def end_of_json_object(text: str, begin: int) -> int | None:
    """Where the object ends that begins there; None when none does.

    >>> end_of_json_object('x{"y": {}} z', 1), end_of_json_object('{"y": ', 0)
    (10, None)
    """
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return end if isinstance(value, dict) and not is_deeper(value) else None


def format_json(value: JsonObject) -> str:
    """As JSON text."""
    return _ENCODER.encode(value)


def is_deeper(value: object, depth: int = MAX_DEPTH) -> bool:
    """Whether lists and objects nest more than `depth` levels deep.

    >>> is_deeper([[]], 2), is_deeper([[[]]], 2)
    (False, True)
    """
    if isinstance(value, dict):
        children = value.values()
    elif isinstance(value, list):
        children = value
    else:
        return False
    return depth == 0 or any(is_deeper(child, depth - 1) for child in children)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Made once: to make one costs more than to use it.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
