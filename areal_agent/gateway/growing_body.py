"""The bodies of one session's calls, each of which repeats the one before and adds a little: only that is decoded.

::

    before   {"model":..., "messages":[ m1, m2          ], "tools":...}
    now      {"model":..., "messages":[ m1, m2, a2, m3  ], "tools":...}
                                        ────── the same bytes: the same messages, decoded before
             ────────────────────────── ▒ ─────────────────────── decoded, with a mark in their place

A decoder that has read the same bytes is in the same place, so what follows means the same. When what follows the
messages is the same, too, as nearly always, the added messages alone are decoded. It knows no field but `messages`, and
nothing of their form.
"""

import json
import secrets
from typing import Any, cast

import orjson

from areal_agent.types import JsonObject

MAX_KEPT_BYTES = 2**20
"""A longer body is decoded anew each time: nothing of it is kept."""

MAX_TAIL_BYTES = 2**16
"""What follows the messages, and is kept decoded, too: tools mostly."""

_MARK = secrets.token_hex(16)
_MARK_JSON = orjson.dumps(_MARK)
_DECODER = json.JSONDecoder()
_SPACE = " \t\n\r"


class GrowingBody:
    """Decodes the bodies of one session. What it returns shares messages with what it returned before: change none."""

    def __init__(self) -> None:
        self._newest = b""
        self._end = 0  # of its last message; 0: nothing is known
        self._list_at = 0  # where in it the list of messages begins: behind the bracket
        self._messages: list[Any] = []
        self._tail = b""  # what follows its last message; nothing: not known
        self._others: JsonObject = {}  # its other fields

    def decode(self, payload: bytes) -> object:
        """The JSON of a body. Raises orjson.JSONDecodeError."""
        is_longer = 0 < self._end < len(payload)
        body = None
        if is_longer and payload[: self._end] == self._newest[: self._end]:
            body = self._with_messages_more(payload) or self._grown(payload)
        if body is None:
            body = orjson.loads(payload)
            self._remember(payload, body)
        return body

    def _with_messages_more(self, payload: bytes) -> JsonObject | None:
        """A body that differs from the one before by messages behind its last; None where that is not sure."""
        end = len(payload) - len(self._tail)
        if not self._tail or payload[self._end : self._end + 1] != b"," or not payload.endswith(self._tail):
            return None
        try:
            added: list[Any] = orjson.loads(b"[%b]" % payload[self._end + 1 : end])
        except orjson.JSONDecodeError:
            return None
        if not added or not all(isinstance(message, dict) for message in added):
            return None
        self._messages = [*self._messages, *added]
        self._keep(payload, end)
        return {**self._others, "messages": self._messages}

    def _grown(self, payload: bytes) -> JsonObject | None:
        """A body that begins as the one before; None where it is not sure that it goes on with its messages."""
        rest = payload[self._end :]
        try:
            body: dict[str, Any] = orjson.loads(payload[: self._list_at] + _MARK_JSON + rest)
        except orjson.JSONDecodeError:
            return None
        marked = body["messages"]
        if not (isinstance(marked, list) and marked and marked[0] == _MARK):
            return None  # the key comes a second time
        added = cast("list[Any]", marked)[1:]
        end = _end_of(added, rest)
        if end is None:
            return None
        body["messages"] = self._messages = [*self._messages, *added]
        end += self._end
        self._keep(payload, end)
        is_short = len(payload) - end <= MAX_TAIL_BYTES
        self._tail, self._others = (payload[end:], dict(body)) if is_short else (b"", {})
        return body

    def _remember(self, payload: bytes, body: object) -> None:
        self._newest, self._end, self._messages = b"", 0, []
        self._tail, self._others = b"", {}
        if not isinstance(body, dict) or len(payload) > MAX_KEPT_BYTES:
            return
        messages = cast("dict[str, Any]", body).get("messages")
        list_at = _list_of_messages(payload.decode()) if isinstance(messages, list) and messages else None
        if list_at is None:
            return
        end = _end_of(cast("list[Any]", messages), b"," + payload[list_at:])
        if end is not None:
            self._list_at, self._messages = list_at, cast("list[Any]", messages)
            self._keep(payload, list_at + end - 1)

    def _keep(self, payload: bytes, end: int) -> None:
        """The body itself: a part of it would be a copy, beside the one that its request holds."""
        self._newest, self._end = (payload, end) if len(payload) <= MAX_KEPT_BYTES else (b"", 0)


def _list_of_messages(text: str) -> int | None:
    """At which byte of a body, valid JSON, the list of messages begins, behind its bracket; None: it has none."""
    at = _behind(text, 0, "{")
    try:
        while at is not None:
            key, at = _DECODER.raw_decode(text, at)
            at = _behind(text, at, ":")
            if at is None:
                return None
            if key == "messages":
                return len(text[: at + 1].encode()) if text[at] == "[" else None
            _, at = _DECODER.raw_decode(text, at)
            at = _behind(text, at, ",")
    except (ValueError, RecursionError):
        return None
    return None


def _end_of(messages: list[Any], written: bytes) -> int | None:
    """Where in `written`, valid JSON, the last of these messages ends; a comma comes before each. None: none is there.

    Messages that are no objects are left to those who refuse them.
    """
    text, at = written.decode(), 0
    for message in messages:
        at = _behind(text, at, ",")
        if at is None or not isinstance(message, dict):
            return None
        try:
            read, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        if not isinstance(read, dict):
            return None
    return at if text.isascii() else len(text[:at].encode())


def _behind(text: str, at: int, mark: str) -> int | None:
    """The place behind `mark` and the white space around it; None when something else stands there."""
    at = _behind_space(text, at)
    return _behind_space(text, at + 1) if text[at : at + 1] == mark else None


def _behind_space(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACE and at < len(text):
        at += 1
    return at
