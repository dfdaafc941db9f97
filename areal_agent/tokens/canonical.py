"""Decides when two messages are the same data, and reads and writes strict JSON. Pure functions.

A normalised message has its content as one string (with images: a list of them, by digest, and of the texts between
them), and the arguments of each tool call as the parsed object (or as the text, if that is not a JSON object). White
space around an answer, its line ends (`\\r\\n` or `\\n`), `null` instead of empty content, the ids of tool calls, the
layout of their JSON and the form of its numbers (`1.0` or `1`) do not count, because client libraries change all of
them. The reasoning of an answer and the text beside its calls, which many clients leave out, and its name, which agent
frameworks add, do not count either: `are_asides_repeated` and `has_same_asides` compare them where that matters.

One kind of echo is not recognised: arguments that come back as an object instead of text, with an integer beyond 64
bits. The parser of request bodies turns it into a float, which has fewer digits; treating the two as equal would accept
an edited number as the sampled one. For the same reason a float from 2**53 on is equal to no integer.
"""

import json
import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NoReturn, cast

import orjson

from areal_agent.types import JsonObject

DIGEST_BYTES = 16

FIRST_INEXACT = 2**53
"""From here on several integers become the same float."""

Asides = tuple[bytes | None, bytes | None]
"""The digests of what an agent may leave out of an answer: its reasoning, and the text beside its calls."""

MAX_DEPTH = 64
"""The deepest nesting that is accepted. Nobody nests deeper on purpose, and some JSON parsers fail beyond it."""


def digest(data: bytes) -> bytes:
    """Return a digest wide enough that equal digests mean equal data."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def tools_key(tools: Sequence[JsonObject], options: JsonObject | None = None) -> bytes:
    """Return the key of tool definitions and of the template's options.

    The order of tools counts, because the template writes them in order.
    """
    key = digest(orjson.dumps(tools))
    return digest(key + orjson.dumps(options, option=orjson.OPT_SORT_KEYS)) if options else key


def head_length(messages: Sequence[JsonObject]) -> int:
    """Return the number of system messages at the start; the rest of the conversation is its body."""
    return next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))


def prefix_keys(messages: Iterable[JsonObject], key: bytes = b"") -> list[bytes]:
    """Return the key of every prefix: entry i stands for `messages[: i + 1]` after what `key` stands for."""
    keys: list[bytes] = []
    for message in messages:
        key = extended_key(key, message)
        keys.append(key)
    return keys


def extended_key(key: bytes, message: JsonObject) -> bytes:
    """Return the key of a conversation after one more message."""
    return digest(key + _canonical(message))


def _canonical(message: JsonObject) -> bytes:
    role = message["role"]
    if role != "assistant":
        return orjson.dumps((role, message.get("content") or "", message.get("name")))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    content = "" if calls else split_thinking(message)[1]
    said = (role, content, [(function["name"], function["arguments"]) for function in calls])
    data = sorted_json(said)
    return sorted_json(_by_value(said)) if b".0" in data else data  # every float that may be an integer is written so


def sorted_json(value: object) -> bytes:
    """Return `value` as JSON text with sorted keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # orjson writes no integers beyond 64 bits; arithmetic tools produce them
        return json.dumps(value, sort_keys=True).encode()


def _by_value(value: Any) -> Any:
    """Replace each float that equals one integer only by that integer."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < FIRST_INEXACT else value
    if isinstance(value, dict):
        return {name: _by_value(item) for name, item in cast("JsonObject", value).items()}
    if isinstance(value, (list, tuple)):
        return [_by_value(item) for item in cast("Sequence[Any]", value)]
    return value


def split_thinking(message: JsonObject) -> tuple[str | None, str]:
    """Return the reasoning and the content of an answer, even if the reasoning is inside the content.

    >>> split_thinking({"role": "assistant", "content": "<think>hm</think>yes"})
    ('hm', 'yes')
    """
    content, reasoning = (message.get("content") or "").strip().replace("\r\n", "\n"), message.get("reasoning_content")
    if not reasoning and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.removeprefix("<think>")
    return (reasoning or "").strip().replace("\r\n", "\n") or None, content.strip()


def asides(message: JsonObject) -> Asides:
    """Return the digests of an answer's reasoning and of the text beside its calls; None for what it does not have."""
    reasoning, content = split_thinking(message)
    beside = content if message.get("tool_calls") else None
    return digest(reasoning.encode()) if reasoning else None, digest(beside.encode()) if beside else None


def are_asides_repeated(recorded: Asides, echo: JsonObject) -> bool:
    """Return whether an echoed answer has the recorded asides or leaves them out."""
    return all(echoed is None or echoed == one for one, echoed in zip(recorded, asides(echo), strict=True))


def has_same_asides(one: JsonObject, other: JsonObject) -> bool:
    """Return whether two messages with equal keys also have the same name and asides."""
    return one.get("name") == other.get("name") and asides(one) == asides(other)


def with_stop_text(answer: JsonObject, stop_text: str) -> list[JsonObject]:
    """Return an answer as agents send it back that add the stop text, which the model sampled and they did not get."""
    if not stop_text or answer.get("tool_calls"):
        return []
    content = answer["content"]
    return [{**answer, "content": said + stop_text} for said in dict.fromkeys((content, content.strip()))]


def with_defaults(answer: JsonObject, tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return an answer as agents send it back that write the defaults of the tools' schemas into its calls.

    >>> edit = {"name": "edit", "parameters": {"properties": {"path": {}, "all": {"default": False}}}}
    >>> answer = {"role": "assistant", "tool_calls": [{"function": {"name": "edit", "arguments": {"path": "x"}}}]}
    >>> with_defaults(answer, [{"type": "function", "function": edit}])[0]["tool_calls"]
    [{'function': {'name': 'edit', 'arguments': {'all': False, 'path': 'x'}}}]
    """
    called = answer.get("tool_calls") or []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools} if called else {}
    calls: list[JsonObject] = []
    for call in called:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if isinstance(arguments, dict):
            arguments = {**_defaults(schemas.get(name)), **cast("JsonObject", arguments)}
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return [{**answer, "tool_calls": calls}] if calls != called else []


def _defaults(schema: Any) -> JsonObject:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    items = cast("JsonObject", properties).items() if isinstance(properties, dict) else ()
    return {name: item["default"] for name, item in items if isinstance(item, dict) and "default" in item}


def call_ids(message: JsonObject) -> tuple[str, ...]:
    """Return the ids of a message's tool calls."""
    return tuple(call.get("id", "") for call in message.get("tool_calls") or ())


def parse_json_object(text: str) -> dict[str, Any] | None:
    """Parse `text` as a JSON object, or return None. NaN, Infinity and lone surrogates are refused; integers are exact.

    >>> parse_json_object('{"x": 123456789012345678901}'), parse_json_object('{"x": NaN}')
    ({'x': 123456789012345678901}, None)
    """
    parsed = parse_json_value(text)
    return parsed[0] if parsed and isinstance(parsed[0], dict) else None


def parse_json_value(text: str) -> tuple[Any] | None:
    """Parse `text` as JSON of any type, as strictly as an object. Return the value in a tuple, or None.

    >>> parse_json_value(" null "), parse_json_value("none")
    ((None,), None)
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return (value,) if _is_good(value, text) else None


def json_object_at(text: str, begin: int) -> tuple[dict[str, Any], int] | None:
    """Parse the JSON object that starts at `begin`. Return it and its end, or None.

    >>> json_object_at('x{"y": {}} z', 1), json_object_at('{"y": ', 0)
    (({'y': {}}, 10), None)
    """
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return (value, end) if isinstance(value, dict) and _is_good(value, text) else None


def format_json(value: JsonObject) -> str:
    """Return `value` as JSON text."""
    return _ENCODER.encode(value)


def is_deeper(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether lists and objects nest more than `depth` levels deep.

    >>> is_deeper([[]], 2), is_deeper([[[]]], 2)
    (False, True)
    """
    if not isinstance(value, (dict, list)):
        return False
    if depth == 0:
        return True
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, (dict, list)) and is_deeper(child, depth - 1):  # checked before the call, which costs more
            return True
    return False


def is_unicode(text: str) -> bool:
    """Return whether `text` has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_good(value: Any, text: str) -> bool:
    """`text` contains the JSON of `value`."""
    if is_deeper(value):
        return False
    return is_unicode(_ENCODER.encode(value) if "\\u" in text else text)  # an escape may be half a pair


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a float")
    return number


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Constructed once, because construction costs more than use.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
