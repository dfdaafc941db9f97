"""Prompts and answers of a session that are no conversations (`/v1/completions`): found by their text or their ids.

Knows nothing of messages and templates.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from areal_agent.tokens.canonical import DIGEST_BYTES, digest
from areal_agent.tokens.prompt import Answer, Key, packed
from areal_agent.tokens.renderer import Renderer

SCOPE = b"completion"
"""In the place of the digest of tool definitions: no conversation has it."""


def completion_key(prompt: str | Sequence[int]) -> Key:
    """Identifies a prompt: equal texts are equal, and equal ids."""
    kind, data = (b"text", prompt.encode()) if isinstance(prompt, str) else (b"ids", packed(prompt).tobytes())
    return Key(head=kind, body=digest(data), tools=SCOPE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """An answer that a prompt continues: it keeps `fork_at` tokens of its path, and `rest` follows them."""

    answer: Answer
    fork_at: int
    rest: str | Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    answer: Answer
    fork_at: int


@dataclass(kw_only=True, slots=True)
class Completions:
    """The answered prompts of a session. An answer that ended by itself may be continued behind or before its end."""

    _by_text: "_Prefixes" = field(default_factory=lambda: _Prefixes())
    _by_ids: "_Prefixes" = field(default_factory=lambda: _Prefixes())

    def add(self, answer: Answer, prompt_text: str, renderer: Renderer) -> None:
        """Make an answer known."""
        path = (*answer.prompt.token_ids(), *answer.sampled)
        self._add(answer, path, prompt_text + renderer.text_of(answer.sampled, has_ended=False))
        if answer.sampled and answer.sampled[-1] in renderer.stop_token_ids:
            self._add(answer, path[:-1], prompt_text + renderer.text_of(answer.sampled, has_ended=True))

    def _add(self, answer: Answer, path: Sequence[int], text: str) -> None:
        place = _Place(answer=answer, fork_at=len(path))
        self._by_ids.add(packed(path).tobytes(), place)
        self._by_text.add(text.encode(), place)

    def find(self, prompt: str | Sequence[int]) -> Continued | None:
        """The longest recorded prompt and answer with which `prompt` begins."""
        if isinstance(prompt, str):
            data = prompt.encode()
            length, place = self._by_text.longest(data)
            rest: str | Sequence[int] = data[length:].decode() if place else prompt
        else:
            length, place = self._by_ids.longest(packed(prompt).tobytes())
            rest = prompt[length // array("i").itemsize :]
        return place and Continued(answer=place.answer, fork_at=place.fork_at, rest=rest)


@dataclass(kw_only=True, slots=True)
class _Prefixes:
    """Places by the bytes that lead to them."""

    _places: dict[tuple[int, bytes], list[_Place]] = field(default_factory=dict[tuple[int, bytes], list[_Place]])

    def add(self, data: bytes, place: _Place) -> None:
        self._places.setdefault((len(data), digest(data)), []).append(place)

    def longest(self, data: bytes) -> tuple[int, _Place | None]:
        """The longest known beginning of `data`, in one pass; of several equal ones the least continued."""
        running, position = blake2b(digest_size=DIGEST_BYTES), 0
        found: tuple[int, _Place | None] = (0, None)
        for length in sorted({length for length, _ in self._places if length <= len(data)}):
            running.update(data[position:length])
            position = length
            places = self._places.get((length, running.digest()))
            if places:
                found = (length, min(places, key=lambda place: place.answer.num_continuations))
        return found
