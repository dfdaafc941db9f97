"""A position in the text of an answer that may still be arriving, and what comes next there.

Every method raises `MoreNeeded` when it needs more text to decide; at the end of the answer it decides with what it
has. The cursor checks only the structure of JSON (brackets, quotes, commas, colons), so that a malformed call ends
where its text breaks. Whether a whole value is strict JSON is decided by `tokens/canonical.py`.
"""

import re
from collections.abc import Callable

from areal_agent.tokens.canonical import MAX_DEPTH, json_object_at, parse_json_object
from areal_agent.types import JsonObject

SPACE = re.compile(r"[ \t\n\r]*")
"""White space as JSON defines it."""

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+', re.DOTALL)
_SCALAR = re.compile(r"[\w.+-]*")


class MalformedCall(Exception):
    """The text does not have what a tool call has in this place."""


class MoreNeeded(Exception):
    """The text at hand is too short to decide."""


class Cursor:
    """Reads forward from `position`.

    >>> cursor = Cursor()
    >>> cursor.append(" {} ")
    >>> cursor.accept("{", "["), cursor.position
    ('{', 2)
    """

    def __init__(self) -> None:
        self.text = ""  # from some place in the answer on; text before it has been read and dropped
        self.position = 0
        self.is_ended = False

    def append(self, text: str) -> None:
        """Add text that has arrived, and drop what has been read."""
        self.text = self.text[self.position :] + text
        self.position = 0

    # -------------------------------------------------------------------------------- literals and patterns

    def peek(self, *literals: str) -> str:
        """Return the literal that comes next after white space, or "" if none does."""
        return self._next(literals)[0]

    def accept(self, *literals: str) -> str:
        """Read the literal that comes next, and the white space before it. If none does, read nothing and return ""."""
        literal, begin = self._next(literals)
        if literal:
            self.position = begin + len(literal)
        return literal

    def expect(self, *literals: str) -> str:
        """Read the next literal as `accept` does, but raise MalformedCall if none comes next."""
        literal = self.accept(*literals)
        if not literal:
            raise MalformedCall
        return literal

    def take(self, characters: re.Pattern[str]) -> str:
        """Read the longest run of the characters in a set, which is given as its pattern `[...]*`."""
        found = characters.match(self.text, self.position)
        text = found[0] if found else ""
        self.position += len(text)
        if self.position == len(self.text) and not self.is_ended:
            raise MoreNeeded
        return text

    def find(self, tags: tuple[str, ...], say: Callable[[str], None]) -> str:
        """Read up to the first of the tags, pass the text before it to `say`, and return the tag; "" at the end.

        Only text that may be the beginning of a tag is held back.
        """
        found = [(begin, tag) for tag in tags if (begin := self.text.find(tag, self.position)) >= 0]
        begin, tag = min(found, default=(self._begin_of_tag(tags), ""))
        if begin > self.position:
            say(self.text[self.position : begin])
            self.position = begin
        if not tag and not self.is_ended:
            raise MoreNeeded
        return tag

    def is_at_end(self) -> bool:
        """Return whether only white space is left of the answer."""
        self.take(SPACE)
        return self.position == len(self.text)

    def until(self, *literals: str) -> tuple[str, str]:
        """Read through the first of the literals. Return the text before it, and the literal.

        If none comes, all that is left is read before MalformedCall is raised.
        """
        found = [(begin, literal) for literal in literals if (begin := self.text.find(literal, self.position)) >= 0]
        if not found:
            if self.is_ended:
                self.position = len(self.text)
            raise MalformedCall if self.is_ended else MoreNeeded
        end, literal = min(found)
        text, self.position = self.text[self.position : end], end + len(literal)
        return text, literal

    def _next(self, literals: tuple[str, ...]) -> tuple[str, int]:
        """Return the literal that comes next, and its position."""
        begin = self.position
        if self.text[begin : begin + 1].isspace():  # asked before the search, which costs more
            space = SPACE.match(self.text, begin)
            begin = space.end() if space else begin
        for literal in literals:
            if self.text.startswith(literal, begin):
                return literal, begin
        if literals and not self.is_ended and self._may_begin(literals, begin):
            raise MoreNeeded
        return "", begin

    def _begin_of_tag(self, tags: tuple[str, ...]) -> int:
        """Return the position at which the text ends with the beginning of a tag, or its length if there is none."""
        length = len(self.text)
        if tags and not self.is_ended:
            for begin in range(max(self.position, length - max(map(len, tags)) + 1), length):
                if self._may_begin(tags, begin):
                    return begin
        return length

    def _may_begin(self, literals: tuple[str, ...], begin: int) -> bool:
        """Return whether all text from `begin` on is the beginning of one of the literals."""
        num_left = len(self.text) - begin
        return any(len(one) > num_left and one.startswith(self.text[begin:]) for one in literals)

    # ------------------------------------------------------------------------------------------------ JSON

    def read_object(self) -> JsonObject | None:
        """Read an object, after its `{`. Return None if its structure is right but it is not strict JSON."""
        begin = self.position - 1
        found = json_object_at(self.text, begin)
        if found:
            self.position = found[1]
            return found[0]
        self._pass_object(0)
        return parse_json_object(self.text[begin : self.position])

    def read_string(self) -> str:
        """Read a string and return its value."""
        self.expect('"')
        raw = self.rest_of_string()
        if "\\" not in raw:
            return raw
        value = parse_json_object(f'{{"": "{raw}"}}')
        if value is None:
            raise MalformedCall
        return value[""]

    def pass_value(self, depth: int = 0) -> None:
        """Read a value of any kind."""
        if depth > MAX_DEPTH:
            raise MalformedCall
        match self.accept("{", "[", '"'):
            case "{":
                self._pass_object(depth)
            case "[":
                self._pass_list(depth)
            case '"':
                self.rest_of_string()
            case _:
                self.take(SPACE)
                if not self.take(_SCALAR):
                    raise MalformedCall

    def _pass_object(self, depth: int) -> None:
        separator = "" if self.accept("}") else ","
        while separator == ",":
            self.expect('"')
            self.rest_of_string()
            self.expect(":")
            self.pass_value(depth + 1)
            separator = self.expect(",", "}")

    def _pass_list(self, depth: int) -> None:
        separator = "" if self.accept("]") else ","
        while separator == ",":
            self.pass_value(depth + 1)
            separator = self.expect(",", "]")

    def rest_of_string(self, quote: str = '"', inside: re.Pattern[str] = _IN_STRING) -> str:
        """Read a string, after its first quote. Return the text between the quotes, with its escapes.

        `inside` is the longest run of characters and whole escapes.
        """
        begin = self.position
        while True:
            self.take(inside)
            character = self._one()
            if character == quote:
                return self.text[begin : self.position - 1]
            if character != "\\":
                raise MalformedCall
            self._one()

    def _one(self) -> str:
        """Read the next character."""
        if self.position == len(self.text):
            raise MalformedCall if self.is_ended else MoreNeeded
        self.position += 1
        return self.text[self.position - 1]
