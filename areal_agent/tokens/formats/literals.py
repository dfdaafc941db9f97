"""Values that are almost JSON: Gemma's, whose strings have tags for quotes, and Python's literals."""

import json
import re
from dataclasses import dataclass
from typing import Any, cast

from areal_agent.tokens.canonical import MAX_DEPTH, is_unicode, parse_json_value
from areal_agent.tokens.formats.cursor import SPACE, Cursor, MalformedCall

_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NUMBER_OR_WORD = re.compile(r"[\w.+-]*")
_BARE_TEXT = re.compile(r"[^,{}\[\]<]*")
_BARE_KEY = re.compile(r"[^:,{}\[\]<]*")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "\n": ""}
_IN_STRING = {
    '"': re.compile(r'[^"\\\n]*+(?:\\.[^"\\\n]*+)*+', re.DOTALL),
    "'": re.compile(r"[^'\\\n]*+(?:\\.[^'\\\n]*+)*+", re.DOTALL),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Literals:
    """Values whose strings are between tags without escapes (`quote`), or are Python's (None)."""

    quote: str | None = None

    def read(self, cursor: Cursor, depth: int = 0) -> Any:
        """Read a value. Raises MalformedCall."""
        if depth > MAX_DEPTH:
            raise MalformedCall
        match cursor.accept("{", "[", *self._quotes):
            case "{":
                return self.read_members(cursor, "}", depth)
            case "[":
                return self._read_list(cursor, depth)
            case "":
                return self._read_bare(cursor)
            case quote:
                return self._read_string(cursor, quote)

    def read_members(self, cursor: Cursor, end: str, depth: int = 0) -> dict[str, Any]:
        """Read keys and values through `end`."""
        members: dict[str, Any] = {}
        separator = "" if cursor.accept(end) else ","
        while separator == ",":
            key = self._read_key(cursor)
            cursor.expect(":")
            members[key] = self.read(cursor, depth + 1)
            separator = cursor.expect(",", end)
        return members

    def _read_list(self, cursor: Cursor, depth: int) -> list[Any]:
        values: list[Any] = []
        separator = "" if cursor.accept("]") else ","
        while separator == ",":
            values.append(self.read(cursor, depth + 1))
            separator = cursor.expect(",", "]")
        return values

    def _read_key(self, cursor: Cursor) -> str:
        quote = cursor.accept(*self._quotes)
        if quote:
            return self._read_string(cursor, quote)
        key = cursor.take(_BARE_KEY).strip() if self.quote else ""
        if not key:
            raise MalformedCall
        return key

    def _read_bare(self, cursor: Cursor) -> Any:
        cursor.take(SPACE)
        word = cursor.take(_BARE_TEXT if self.quote else _NUMBER_OR_WORD).strip()
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        parsed = parse_json_value(word)
        if parsed:
            return parsed[0]
        if not self.quote or not word:
            raise MalformedCall
        return word

    def _read_string(self, cursor: Cursor, quote: str) -> str:
        if self.quote:
            return cursor.until(quote)[0]
        try:
            text = _ESCAPE.sub(_unescaped, cursor.rest_of_string(quote, _IN_STRING[quote]))
        except (ValueError, OverflowError) as error:  # there is no such character
            raise MalformedCall from error
        if not is_unicode(text):
            raise MalformedCall
        return text

    def write(self, value: Any) -> str:
        """Write a value. Raises ValueError if it cannot be written."""
        if isinstance(value, str):
            if self.quote is None:
                return json.dumps(value, ensure_ascii=False)
            if self.quote in value:
                raise ValueError(f"text with {self.quote} cannot be written")
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            return f"{{{self.write_members(cast('dict[str, Any]', value))}}}"
        if isinstance(value, list):
            return f"[{','.join(self.write(one) for one in cast('list[Any]', value))}]"
        return str(value) if self.quote is None else json.dumps(value)

    def write_members(self, members: dict[str, Any]) -> str:
        """Write keys and values."""
        return ",".join(f"{self._write_key(key)}:{self.write(value)}" for key, value in members.items())

    def _write_key(self, key: str) -> str:
        if self.quote is None:
            return self.write(key)
        if not key or key != key.strip() or not _BARE_KEY.fullmatch(key):
            raise ValueError(f"the key {key!r} cannot be written")
        return key

    @property
    def _quotes(self) -> tuple[str, ...]:
        return ('"', "'") if self.quote is None else (self.quote,)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\\'\"" else found[0])
