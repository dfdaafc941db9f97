"""Tool calls whose arguments are literals, but not JSON.

::

    <|tool_call>call:python{code:<|"|>print(6 * 7)<|"|>}<tool_call|>                      Gemma 4: tags for quotes
    <start_function_call>call:python{code:<escape>1<escape>}<end_function_call>           FunctionGemma
    [python(code="print(6 * 7)"), python(code="1")]                                       Llama 4: Python
    <|tool_call_start|>[python(code="print(6 * 7)")]<|tool_call_end|>                     LFM2

Llama 4 may also begin other text with `[`; a name and a parenthesis show that it is a call.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from areal_agent.tokens.canonical import MAX_DEPTH, is_unicode, parse_json_value
from areal_agent.tokens.formats.base import BARE_NAME, Marks, PartialCall, ToolCall
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
        if depth >= MAX_DEPTH:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma:
    """The tags of one of the models."""

    begin: str
    end: str
    quote: str

    @property
    def marks(self) -> Marks:
        return Marks(openings=(self.begin,), closing=self.end)

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        cursor.expect("call:")
        call.set_name(cursor.take(BARE_NAME))
        cursor.expect("{")
        call.has_arguments = True
        call.set_arguments(self._literals.read_members(cursor, "}"))
        cursor.expect(self.end)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        written = (
            f"{self.opening(call.name)}{self._literals.write_members(dict(call.arguments))}}}{self.end}"
            for call in calls
        )
        return content + "".join(written)

    def opening(self, tool_name: str | None) -> str:
        return f"{self.begin}call:" + ("" if tool_name is None else f"{tool_name}{{")

    @property
    def _literals(self) -> Literals:
        return Literals(quote=self.quote)


GEMMA_4 = Gemma(begin="<|tool_call>", end="<tool_call|>", quote='<|"|>')
FUNCTION_GEMMA = Gemma(begin="<start_function_call>", end="<end_function_call>", quote="<escape>")


_NAME = re.compile(r"[\w.]*")
_PYTHON = Literals()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pythonic:
    """The tags of one of the models."""

    begin: str
    end: str
    is_bare: bool  # models leave out the tags

    @property
    def marks(self) -> Marks:
        return Marks(
            openings=(self.begin,),
            closing=")",
            bare_openings=("[",) if self.is_bare else (),
            separators=(",",),
            endings=("]", self.end),
        )

    def read(self, cursor: Cursor, call: PartialCall, opening: str) -> None:
        if opening == self.begin:
            cursor.expect("[")
        cursor.take(SPACE)
        call.set_name(cursor.take(_NAME))
        cursor.expect("(")
        arguments: dict[str, Any] = {}
        separator = cursor.accept(")")
        while separator != ")":
            cursor.take(SPACE)
            name = cursor.take(_NAME)
            cursor.expect("=")
            call.has_arguments = True
            arguments[name] = _PYTHON.read(cursor, 1)
            separator = cursor.expect(",", ")")
            if separator == ",":
                separator = cursor.accept(")")  # after the last comma
        call.set_arguments(arguments)

    def write(self, content: str, calls: Sequence[ToolCall]) -> str:
        tags = ("", "") if self.is_bare and not content else (self.begin, self.end)
        return f"{content}{tags[0]}[{', '.join(map(self._write_call, calls))}]{tags[1]}"

    def _write_call(self, call: ToolCall) -> str:
        for name in (call.name, *call.arguments):
            if not name or not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a name in Python")
        return f"{call.name}({', '.join(f'{key}={_PYTHON.write(value)}' for key, value in call.arguments.items())})"

    def opening(self, tool_name: str | None) -> str:
        return ("" if self.is_bare else self.begin) + "[" + ("" if tool_name is None else f"{tool_name}(")


LLAMA_4 = Pythonic(begin="<|python_start|>", end="<|python_end|>", is_bare=True)
LFM_2 = Pythonic(begin="<|tool_call_start|>", end="<|tool_call_end|>", is_bare=False)
