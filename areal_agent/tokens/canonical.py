"""When two messages are the same data. Pure functions over normalised messages; knows nothing of tokens.

A normalised message has its content as one string, and the arguments of its tool calls as the parsed object (or the
text, if it is no JSON object). White space around an answer, `null` instead of an empty content, ids of tool calls and
the layout of their JSON are not part of what a message says: client libraries change all of them.
"""

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import orjson

from areal_agent.types import JsonObject

DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    """A digest wide enough that equal digests mean equal data."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def tools_key(tools: Sequence[JsonObject]) -> bytes:
    """Identifies tool definitions, their order included: the template writes them in order."""
    return digest(orjson.dumps(tools))


def conversation_keys(messages: Iterable[JsonObject]) -> list[bytes]:
    """Identifies every prefix: entry i is the key of `messages[: i + 1]`."""
    keys: list[bytes] = []
    key = b""
    for message in messages:
        key = extended_key(key, message)
        keys.append(key)
    return keys


def extended_key(key: bytes, message: JsonObject) -> bytes:
    """The key of a conversation after one message more."""
    return digest(key + _canonical(message))


def _canonical(message: JsonObject) -> bytes:
    role, content = message["role"], message.get("content") or ""
    if role != "assistant":
        return orjson.dumps((role, content, message.get("name")))
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    return orjson.dumps((role, content.strip(), message.get("name"), message.get("reasoning_content"), calls))


def _canonical_call(call: JsonObject) -> tuple[str, str]:
    function = call["function"]
    # The standard library's json: integers of any size, which arithmetic tools are fond of.
    return function["name"], json.dumps(function["arguments"], sort_keys=True)
