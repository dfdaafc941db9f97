"""When two messages are the same data. Pure functions over normalised messages; knows nothing of tokens.

A normalised message has its content as one string, and the arguments of its tool calls as the parsed object (or the
text, if it is no JSON object). White space around an answer, `null` instead of an empty content, ids of tool calls and
the layout of their JSON are not part of what a message says: client libraries change all of them. Nor are the reasoning
of an answer, which many clients leave out, and its name, which agent frameworks add: `is_reasoning_repeated` and
`has_same_asides` compare them where that matters.

One echo is not recognised: arguments that come back as an object, not as text, with an integer beyond 64 bits. The
reader of request bodies makes it a float, whose digits are fewer; to take both for the same would take an edited number
for the sampled one.

JSON objects inside text: the arguments of tool calls. Strict, and exact: integers keep all their digits.
"""

import json
import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NoReturn, cast

import orjson

from areal_agent.types import JsonObject

DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    """A digest wide enough that equal digests mean equal data."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def tools_key(tools: Sequence[JsonObject]) -> bytes:
    """Identifies tool definitions, their order included: the template writes them in order."""
    return digest(orjson.dumps(tools))


def head_length(messages: Sequence[JsonObject]) -> int:
    """How many system messages a conversation begins with; what follows is its body."""
    return next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))


def prefix_keys(messages: Iterable[JsonObject], key: bytes = b"") -> list[bytes]:
    """Identifies every prefix, behind what `key` identifies: entry i is the key of `messages[: i + 1]`."""
    keys: list[bytes] = []
    for message in messages:
        key = extended_key(key, message)
        keys.append(key)
    return keys


def extended_key(key: bytes, message: JsonObject) -> bytes:
    """The key of a conversation after one message more."""
    return digest(key + _canonical(message))


def split_thinking(message: JsonObject) -> tuple[str | None, str]:
    """Reasoning and content of an answer, also when the reasoning stands in the content.

    >>> split_thinking({"role": "assistant", "content": "<think>hm</think>yes"})
    ('hm', 'yes')
    """
    content, reasoning = (message.get("content") or "").strip(), message.get("reasoning_content")
    if not reasoning and "</think>" in content:
        reasoning, _, content = content.partition("</think>")
        reasoning = reasoning.removeprefix("<think>")
    return (reasoning or "").strip() or None, content.strip()


def reasoning_digest(message: JsonObject) -> bytes | None:
    """Identifies the reasoning of an answer; None when it has none."""
    reasoning, _ = split_thinking(message)
    return None if reasoning is None else digest(reasoning.encode())


def is_reasoning_repeated(recorded: bytes | None, echo: JsonObject) -> bool:
    """Whether an echoed answer has the recorded reasoning; one that leaves it out has."""
    echoed = reasoning_digest(echo)
    return echoed is None or echoed == recorded


def has_same_asides(one: JsonObject, other: JsonObject) -> bool:
    """Whether two equal messages that nobody sampled are equal in what their key leaves out, too."""
    return one.get("name") == other.get("name") and reasoning_digest(one) == reasoning_digest(other)


def call_ids(message: JsonObject) -> tuple[str, ...]:
    """The ids of a message's tool calls."""
    return tuple(call.get("id", "") for call in message.get("tool_calls") or ())


def _canonical(message: JsonObject) -> bytes:
    role = message["role"]
    if role != "assistant":
        return orjson.dumps((role, message.get("content") or "", message.get("name")))
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = (role, split_thinking(message)[1], [(function["name"], function["arguments"]) for function in calls])
    try:
        return orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers beyond 64 bits, which arithmetic tools are fond of
        return json.dumps(said, sort_keys=True).encode()


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
