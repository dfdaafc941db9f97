"""Keeps the text of messages from forging control tokens, without a template noticing.

A control text inside a message, such as `<|im_end|>`, has to be tokenised as plain text. `Shield` breaks it up with an
unguessable text, at which rendered text is cut before it is tokenised. A template must not see that: some decide by the
content (Qwen3.5: is this question a tool's response?). So what is broken up is a `Shielded` string: the text that it
contributes to a prompt is the broken one, and what it answers to a template's questions is the original's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, SupportsIndex, cast

import orjson

from areal_agent.tokens.words import any_of
from areal_agent.types import JsonObject


class Shielded(str):
    """A text with `mark` inserted at `breaks`, positions in the `plain` text, by which it is compared and searched.

    >>> text = Shielded.of("<|end|>!", (1,), "#")
    >>> "".join((text, "")), text.startswith("<|end|>"), "".join((text[:-1].strip() + "<|end|>", ""))
    ('<#|end|>!', True, '<#|end|><|end|>')
    """

    __slots__ = ("breaks", "mark", "plain")

    plain: str
    breaks: tuple[int, ...]
    mark: str

    @classmethod
    def of(cls, plain: str, breaks: Iterable[int], mark: str) -> str:
        """Return the shielded text, or the plain one if there is nothing to break."""
        breaks = tuple(breaks)
        if not breaks:
            return plain
        self = cls(mark.join(plain[start:end] for start, end in pairwise((0, *breaks, len(plain)))))
        self.plain, self.breaks, self.mark = plain, breaks, mark
        return self

    def _cut(self, start: int, end: int, *, keeps_edges: bool = False) -> str:
        """Return a slice. `keeps_edges`: nothing may join it to a neighbour, as the parts of a split text may be."""
        breaks = [place - start for place in self.breaks if start <= place <= end]
        if keeps_edges:
            breaks = [0] * (start > 0) + breaks + [end - start] * (end < len(self.plain))
        return Shielded.of(self.plain[start:end], dict.fromkeys(breaks), self.mark)

    def _cuts(self, pieces: Iterable[str], separator: str | None = "") -> Iterator[str]:
        """Return slices for pieces of the plain text, which stand in it with the separator between them."""
        end = -len(separator or "")
        for piece in pieces:
            start = self.plain.index(piece, end + len(separator or ""))
            end = start + len(piece)
            yield self._cut(start, end, keeps_edges=True)

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self.plain)

    def __eq__(self, other: object) -> bool:
        return self.plain == plain_of(other)

    def __ne__(self, other: object) -> bool:
        return self.plain != plain_of(other)

    def __len__(self) -> int:
        return len(self.plain)

    def __contains__(self, part: object) -> bool:
        return plain_of(part) in self.plain

    def __add__(self, other: str) -> str:
        return joined((self, other))

    def __radd__(self, other: str) -> str:
        return joined((other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            return self.plain[key]
        start, end, step = key.indices(len(self.plain))
        return self._cut(start, max(start, end)) if step == 1 else str.__getitem__("".join((self, "")), key)

    def startswith(self, prefix: Any, *limits: Any) -> bool:
        return self.plain.startswith(prefix, *limits)

    def endswith(self, suffix: Any, *limits: Any) -> bool:
        return self.plain.endswith(suffix, *limits)

    def find(self, part: str, *limits: Any) -> int:
        return self.plain.find(part, *limits)

    def rfind(self, part: str, *limits: Any) -> int:
        return self.plain.rfind(part, *limits)

    def index(self, part: str, *limits: Any) -> int:
        return self.plain.index(part, *limits)

    def count(self, part: str, *limits: Any) -> int:
        return self.plain.count(part, *limits)

    def strip(self, characters: str | None = None, /) -> str:
        start = len(self.plain) - len(self.plain.lstrip(characters))
        return self._cut(start, max(start, len(self.plain.rstrip(characters))))

    def lstrip(self, characters: str | None = None, /) -> str:
        return self._cut(len(self.plain) - len(self.plain.lstrip(characters)), len(self.plain))

    def rstrip(self, characters: str | None = None, /) -> str:
        return self._cut(0, len(self.plain.rstrip(characters)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix) if self.plain.startswith(prefix) else 0, len(self.plain))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self.plain.removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return list(self._cuts(self.plain.split(sep, maxsplit), sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return list(self._cuts(self.plain.rsplit(sep, maxsplit), sep))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return list(self._cuts(self.plain.splitlines(keepends)))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._cuts(self.plain.partition(sep))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._cuts(self.plain.rpartition(sep))
        return before, found, after

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace("".join((self, "")), old, new, count)
        pieces = self.split(old, count)
        return joined(part for index, piece in enumerate(pieces) for part in ((new, piece) if index else (piece,)))


def plain_of(value: object) -> Any:
    """Return what a value is without its shield."""
    return value.plain if isinstance(value, Shielded) else value


def joined(pieces: Iterable[Any]) -> str:
    """Join texts, as `"".join` does. Jinja calls this for what a template and its macros write."""
    pieces = list(pieces)
    if Shielded not in map(type, pieces):
        return "".join(pieces)
    breaks, length, mark = list[int](), 0, ""
    for piece in pieces:
        if isinstance(piece, Shielded):
            breaks += [length + place for place in piece.breaks]
            mark = piece.mark
        length += len(piece)
    return Shielded.of("".join(map(plain_of, pieces)), dict.fromkeys(breaks), mark)


class Shield:
    """Breaks up control texts, each of at least two characters, wherever they occur in JSON data.

    >>> broken = Shield({"<|end|>"}, mark="#").over({"content": ["a<|end|>"]})
    >>> broken == {"content": ["a<|end|>"]}, "".join((broken["content"][0], ""))
    (True, 'a<#|end|>')
    """

    def __init__(self, texts: set[str] | frozenset[str], *, mark: str) -> None:
        self._pattern = re.compile(f"(?={any_of(texts)})")  # overlapping ones, too
        self._first_characters = tuple({text[0] for text in texts})
        self._first_bytes = tuple(character.encode() for character in self._first_characters)
        self._is_seen_in_json = not any(character in '"\\' or character < " " for character in self._first_characters)
        self._mark = mark

    def over(self, value: Any) -> Any:
        """Return `value` with every control text in its strings and keys broken up after its first character.

        If there is none, it may return `value` itself.
        """
        return value if type(value) is dict and self._is_clean(cast("JsonObject", value)) else self._over(value)

    def _is_clean(self, value: JsonObject) -> bool:
        """Return whether no string in `value` can contain a control text, judged by a quick search of its JSON."""
        try:
            text = orjson.dumps(value) if self._is_seen_in_json else None
        except TypeError:  # integers that are too large for orjson, and values that are not JSON
            return False
        return text is not None and not any(byte in text for byte in self._first_bytes)

    def _over(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._over_text(value)
        if isinstance(value, (dict, Mapping)):  # dict first: it is the usual case, and isinstance of Mapping is slow
            items = cast("Mapping[str, Any]", value).items()
            return {self._over_text(key): self._over(item) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [self._over(item) for item in cast("Sequence[Any]", value)]
        return value

    def _over_text(self, text: str) -> str:
        for character in self._first_characters:
            if character in text:
                return Shielded.of(text, (found.start() + 1 for found in self._pattern.finditer(text)), self._mark)
        return text  # the usual case, ten times faster than a search
