"""Text that is still coming, and the rules that take it: generators that yield whenever they need more.

What a rule takes depends on the text alone, never on where the text was cut into chunks. It knows no format.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from areal_agent.tokens.canonical import json_object_at

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A rule at work: it yields when the text at hand does not decide, and returns what it found."""

SPACE = re.compile(r"[ \t\n\r]*")
"""White space as JSON has it."""


class MalformedCall(Exception):
    """The text that comes next is not what a tool call has in its place. Never leaves the reader."""


class Tape:
    """Reads forward only. What the rules take is in `taken` until `forget`, in pieces, to the last space.

    >>> tape = Tape()
    >>> tape.append(" {}")
    >>> next(tape.accept("{", "["))
    Traceback (most recent call last):
    StopIteration: {
    >>> tape.taken
    [' ', '{']
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self._text = ""
        self._position = 0
        self._is_ended = False

    def append(self, text: str) -> None:
        """More has come."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more will come."""
        self._is_ended = True

    def forget(self) -> None:
        self.taken.clear()

    def accept(self, *literals: str) -> Steps[str]:
        """Take the literal that comes next, and the white space before it; take nothing and return "" if none does."""
        while literals:
            space = SPACE.match(self._text, self._position)
            begin = space.end() if space else self._position
            if self._text.startswith(literals, begin):
                literal = next(one for one in literals if self._text.startswith(one, begin))
                self._take(begin)
                return self._take(begin + len(literal))
            if self._is_ended or not self._may_begin(literals, begin):
                break
            yield
        return ""

    def expect(self, *literals: str) -> Steps[str]:
        """As `accept`, but one of them must come: raises MalformedCall."""
        literal = yield from self.accept(*literals)
        if not literal:
            raise MalformedCall
        return literal

    def take_object(self) -> bool:
        """Take the JSON object whose `{` has just been taken, if all of it is at hand and it is strictly JSON.

        A short way for whole texts: on a text that is still coming, trying it again and again would cost its square.
        """
        found = json_object_at(self._text, self._position - 1)
        if found:
            self._take(found[1])
        return found is not None

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Take as many characters of a set, given as its pattern `[...]*`, as come next."""
        pieces: list[str] = []
        while True:
            match = characters.match(self._text, self._position)
            if match and match.end() > self._position:
                pieces.append(match[0])
                self._take(match.end())
            if self._is_ended or self._position < len(self._text):
                return "".join(pieces)
            yield

    def one(self) -> Steps[str]:
        """Take the next character, whatever it is; raises MalformedCall at the end."""
        while self._position == len(self._text):
            if self._is_ended:
                raise MalformedCall
            yield
        return self._take(self._position + 1)

    def text_until(self, tags: tuple[str, ...], say: Callable[[str], None]) -> Steps[str]:
        """Hand the text before the first of the tags to `say`, as it comes, and take the tag; "" at the end.

        Held back is only what may be the beginning of a tag. What is said is not in `taken`.
        """
        while True:
            begin, tag = self._find(tags)
            if begin > self._position:
                say(self._text[self._position : begin])
                self._position = begin
            if tag:
                return self._take(begin + len(tag))
            if self._is_ended:
                return ""
            yield

    def _find(self, tags: tuple[str, ...]) -> tuple[int, str]:
        """Where the first tag begins, and which; without one, where the text at hand may begin one, and ""."""
        found = [(begin, tag) for tag in tags if (begin := self._text.find(tag, self._position)) >= 0]
        return min(found, default=(self._begin_of_tag(tags), ""))

    def _begin_of_tag(self, tags: tuple[str, ...]) -> int:
        """Where the text at hand ends with the beginning of a tag; its length if it does not."""
        length = len(self._text)
        if tags and not self._is_ended:
            longest = max(map(len, tags))
            for begin in range(max(self._position, length - longest + 1), length):
                if self._may_begin(tags, begin):
                    return begin
        return length

    def _may_begin(self, literals: tuple[str, ...], begin: int) -> bool:
        """Whether all text from `begin` on is the beginning of one of the literals."""
        num_left = len(self._text) - begin
        return any(len(one) > num_left and one.startswith(self._text[begin:]) for one in literals)

    def _take(self, end: int) -> str:
        if end == self._position:
            return ""
        piece = self._text[self._position : end]
        self._position = end
        self.taken.append(piece)
        return piece
