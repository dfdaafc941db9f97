"""Argument values that a model writes as bare text, which only the schema of the tool gives a type.

The rules are those that vLLM and SGLang share: text stays text where the schema allows a string and nothing else, or
says nothing; otherwise JSON of an allowed type is read as such, and what fits no type stays text.
"""

import ast
import json
from collections.abc import Sequence
from typing import Any, cast

from areal_agent.tokens.canonical import format_json, parse_json_value
from areal_agent.types import JsonObject

_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class ParameterTypes:
    """The types of the parameters of a request's tools.

    >>> types = ParameterTypes([{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}])
    >>> types.value("f", "n", "5"), types.value("f", "other", "5")
    (5, '5')
    """

    def __init__(self, tools: Sequence[JsonObject] = ()) -> None:
        self._tools = tools

    def value(self, tool_name: str, parameter: str, text: str) -> Any:
        """Return the value that `text` stands for as an argument of this tool."""
        return value_of(text, self._types(tool_name, parameter))

    def _types(self, tool_name: str, parameter: str) -> set[str]:
        for tool in self._tools:
            function = tool["function"]
            if function["name"] == tool_name:
                schema = function.get("parameters") or {}
                return types_of(_member(schema.get("properties"), parameter), schema)
        return set()


def value_of(text: str, types: set[str]) -> Any:
    """Read a value whose schema allows these types; none: nothing is known of it.

    >>> value_of("5", {"integer"}), value_of("5", {"string"}), value_of("True", {"boolean"}), value_of("x", {"number"})
    (5, '5', True, 'x')
    """
    if types <= {"string"}:
        return text
    word = text.strip().lower()
    if word in ("null", "none") and "null" in types and (word == "null" or "string" not in types):
        return None
    if word in ("true", "false") and "boolean" in types:
        return word == "true"
    parsed = parse_json_value(text) or _python_value(text, types)
    if parsed is None or ("string" in types and not _is_one_of(parsed[0], types)):
        return text
    return parsed[0]


def _python_value(text: str, types: set[str]) -> tuple[Any] | None:
    """Read an object or a list as Python writes it, for templates that write arguments so (Seed-OSS).

    >>> _python_value("{'k': [True, None]}", {"object"})
    ({'k': [True, None]},)
    """
    if not types & {"object", "array"} or text.strip()[:1] not in ("{", "["):
        return None
    try:
        return parse_json_value(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def text_of(value: Any) -> str:
    """Write a value as bare text: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else format_json(value)


def types_of(schema: Any, root: JsonObject) -> set[str]:
    """Return the JSON types that a schema allows, as far as it says so.

    >>> sorted(types_of({"anyOf": [{"type": ["integer", "null"]}, {"enum": ["a"]}]}, {}))
    ['integer', 'null', 'string']
    """
    types: set[str] = set()
    waiting, followed = [schema], set[str]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        one = cast("JsonObject", one)
        said = {name for name in _as_list(one.get("type")) if isinstance(name, str)}
        said |= {_name_of(value) for value in _as_list(one.get("enum"))}
        said |= {_name_of(one["const"])} if "const" in one else set()
        types |= said or {kind for key, kind in (("properties", "object"), ("items", "array")) if key in one}
        for key in ("anyOf", "oneOf", "allOf"):
            waiting += _as_list(one.get(key))
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_referred(reference, root))
    return types


def _is_one_of(value: Any, types: set[str]) -> bool:
    name = _name_of(value)
    return name != "string" and (name in types or (name == "integer" and "number" in types))


def _name_of(value: Any) -> str:
    return _NAMES.get(type(value), "null")


def _referred(reference: str, root: JsonObject) -> Any:
    """Return what a reference within the schema, such as `#/$defs/Color`, refers to; None if there is nothing."""
    found: Any = root if reference.startswith("#/") else None
    for name in reference.removeprefix("#/").split("/"):
        found = _member(found, name)
    return found


def _member(value: Any, name: str) -> Any:
    return cast("JsonObject", value).get(name) if isinstance(value, dict) else None


def _as_list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
