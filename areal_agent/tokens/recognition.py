"""Recognises what a request repeats or continues.

- `Lines` holds the newest conversations as they were sent. A request nearly always repeats one exactly and adds an
  answer and a few messages; a list comparison shows that, and its history is neither normalised nor hashed.
- `AnswersByData` finds, for every other request, the answer that ends its longest recorded prefix, by keys
  (`canonical.py`). Several forms of an answer may have one key.
- `Requests` counts the requests of a session and says how a new one differs from those before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from areal_agent.tokens.canonical import (
    FIRST_INEXACT,
    Asides,
    are_asides_repeated,
    asides,
    call_ids,
    extended_key,
    has_same_asides,
    sorted_json,
)
from areal_agent.tokens.continuation import Normalise
from areal_agent.tokens.prompt import Answer, Key, Prompt
from areal_agent.types import ForkReason, JsonObject


@dataclass(kw_only=True, slots=True, eq=False)
class Line:
    """A conversation as it was sent, up to its newest prompt. It grows; a branch is a new line."""

    tip: Prompt
    messages: list[JsonObject] = field(default_factory=list[JsonObject])
    doubtful: list[int] = field(default_factory=list[int])  # messages for which Python's equality is too weak

    def begins(self, messages: Sequence[JsonObject]) -> bool:
        """Return whether `messages` begin with this conversation."""
        length = len(self.messages)
        return (
            len(messages) >= length
            and messages[length - 1] == self.messages[-1]  # the last message tells most conversations apart
            and list(messages[:length]) == self.messages
            and all(_is_same_json(messages[index], self.messages[index]) for index in self.doubtful)
        )

    def grow(self, prompt: Prompt, messages: Sequence[JsonObject]) -> None:
        """Go on to `prompt`; `messages` are the new ones."""
        self.doubtful += [n for n, message in enumerate(messages, len(self.messages)) if _is_doubtful(message)]
        self.messages.extend(messages)
        self.tip = prompt


class Lines:
    """The `max_lines` conversations that were continued last, newest first."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._lines: list[Line] = []
        self._found: tuple[Sequence[JsonObject], Prompt] | None = None
        """The messages and the tip of the newest search: its request is nearly always the next to be recorded."""

    def find(self, messages: Sequence[JsonObject], tools: bytes) -> Line | None:
        """Find the conversation that a request repeats, or continues with one answer and then no other."""
        for line in self._lines:
            if line.tip.key.tools == tools and line.begins(messages) and _is_next(line, messages):
                self._found = messages, line.tip
                return line
        return None

    def record(self, prompt: Prompt, messages: Sequence[JsonObject]) -> None:
        """Extend the line of an answered request, or begin one."""
        line = self._line_of(prompt, messages)
        if line is not None:
            self._lines.remove(line)
            line.grow(prompt, messages[len(line.messages) :])
        else:
            line = Line(tip=prompt)
            line.grow(prompt, _shared(prompt.messages(), messages))
        self._lines.insert(0, line)
        del self._lines[self._max_lines :]

    def _line_of(self, prompt: Prompt, messages: Sequence[JsonObject]) -> Line | None:
        """Find the line that a request repeats or continues; a request that branches off has none."""
        found, self._found = self._found, None
        keys = {prompt.key, prompt.parent.prompt.key} if prompt.parent else {prompt.key}
        for line in self._lines:
            if line.tip.key in keys:
                is_found = found is not None and found[0] is messages and found[1] is line.tip
                if is_found or line.begins(messages):
                    return line
        return None


def _is_next(line: Line, messages: Sequence[JsonObject]) -> bool:
    """Return whether the messages that follow the line can hold no answer but the tip's."""
    length = len(line.messages)
    if len(messages) == length:
        return not any(_is_answer(message) for message in line.tip.new_messages)
    return _is_answer(messages[length]) and not any(_is_answer(message) for message in messages[length + 1 :])


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"  # pyright: ignore[reportUnknownMemberType]


def _is_doubtful(value: JsonObject | list[Any]) -> bool:
    """Return whether a message has a number that Python calls equal to different data: 1 == True, 2**53 == 2.0**53."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str) or item is None:  # checked before the call, which costs more
            continue
        if isinstance(item, (dict, list)):
            if _is_doubtful(cast("JsonObject | list[Any]", item)):
                return True
        elif item in (0, 1) or abs(item) >= FIRST_INEXACT:
            return True
    return False


def _is_same_json(one: JsonObject, other: JsonObject) -> bool:
    """Return whether messages that Python calls equal are the same JSON."""
    return one is other or sorted_json(one) == sorted_json(other)


def _shared(recorded: Sequence[JsonObject], sent: Sequence[JsonObject]) -> list[JsonObject]:
    """Return `sent`, with equal messages replaced by the recorded objects, so that each is held once."""
    return [old if old == new else new for old, new in zip(recorded, sent, strict=True)]


class AnswersByData:
    """The answers of a forest, by the body of their conversation; head and tools are compared afterwards."""

    def __init__(self) -> None:
        self._by_body: dict[bytes, list[Answer]] = {}
        self._same: dict[bytes, bytes] = {}  # from the bodies that end with another form of an answer to the answer's

    def add(self, answer: Answer, others: Iterable[bytes] = ()) -> None:
        """Register an answer; `others` are the bodies that end with another form of it."""
        self._by_body.setdefault(answer.body, []).append(answer)
        for body in others:
            if body not in self._by_body:
                self._same.setdefault(body, answer.body)

    def key_after(self, body: bytes, message: JsonObject) -> bytes:
        """Return the key of a body after one more message, which may be any form of an answer."""
        key = extended_key(body, message)
        return self._same.get(key, key)

    def of(self, key: Key) -> list[Answer]:
        """Return the answers that end a conversation with this key."""
        return [answer for answer in self._by_body.get(key.body, ()) if _is_same_scope(answer.prompt.key, key)]

    def find(
        self, messages: Sequence[JsonObject], bodies: Sequence[bytes], key: Key, normalise: Normalise
    ) -> tuple[Answer | None, ForkReason | None]:
        """Find the answer that ends the longest prefix of normalised `messages`. If none does, say why.

        `key` has the head and the tools of the request; `bodies` are the keys of the prefixes after the head.
        """
        reason = None
        for body in reversed(bodies):
            answers = self._by_body.get(body, ())
            same = [
                answer
                for answer in answers
                if _is_same_scope(answer.prompt.key, key) and _has_same_asides(answer, messages, normalise)
            ]
            if same:
                return _best(same, messages), None
            reason = reason or _change_between(key, (answer.prompt.key for answer in answers))
        return None, reason


def best_by_echo(answers: Iterable[Answer], echo: JsonObject) -> Answer | None:
    """Choose among equal answers to one prompt: by the call ids of `echo`, by its asides, then the least continued."""
    same = [answer for answer in answers if are_asides_repeated(answer.asides, echo)]
    if len(same) < 2:
        return same[0] if same else None
    return min(same, key=lambda answer: (_changes(answer, echo), answer.num_continuations))


def _best(answers: Sequence[Answer], messages: Sequence[JsonObject]) -> Answer:
    """Choose the answer that is repeated with its ids and asides, as those before it; then the least continued."""
    if len(answers) == 1:
        return answers[0]

    def changes(answer: Answer) -> list[tuple[bool, bool]]:
        return [_changes(one, messages[one.prompt.num_messages]) for one in answer.lineage()]

    return min(answers, key=lambda answer: (changes(answer), answer.num_continuations))


def _changes(answer: Answer, echo: JsonObject) -> tuple[bool, bool]:
    """Return whether an echo has other ids of calls, and other asides."""
    return answer.call_ids != call_ids(echo), answer.asides != asides(echo)


def _is_same_scope(one: Key, other: Key) -> bool:
    return one.head == other.head and one.tools == other.tools


def _has_same_asides(answer: Answer, messages: Sequence[JsonObject], normalise: Normalise) -> bool:
    """Return whether sampled asides are repeated or left out, and the agent's own are repeated."""
    for one in answer.lineage():
        if not are_asides_repeated(one.asides, messages[one.prompt.num_messages]):
            return False
        first = one.prompt.num_messages - len(one.prompt.new_messages)
        for index, recorded in enumerate(one.prompt.new_messages, first):
            if recorded.get("role") == "assistant" and not has_same_asides(messages[index], normalise(recorded, index)):
                return False
    return True


@dataclass(kw_only=True, slots=True)
class _Seen:
    key: Key
    opening: str
    num_planned: int = 0
    answered_after: set[Asides | None] = field(default_factory=set["Asides | None"])  # what its parents left beside


class Requests:
    """All requests of a session."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self._by_body: dict[bytes, list[_Seen]] = {}

    def add(self, key: Key, opening: str = "") -> int:
        """Count a request. Return the number of earlier ones with the same messages, tools and opening."""
        same = self._by_body.setdefault(key.body, [])
        request = next((one for one in same if one.key == key and one.opening == opening), None)
        if request is None:
            request = _Seen(key=key, opening=opening)
            same.append(request)
        request.num_planned += 1
        return request.num_planned - 1

    def record(self, key: Key, parent: Answer | None) -> None:
        """Mark a request that was added, and continues `parent`, as answered."""
        self.num_recorded += 1
        for request in self._of(key):
            request.answered_after.add(parent and parent.asides)

    def is_recorded(self, key: Key, parent: Answer | None) -> bool:
        """Return whether the same messages and tools were answered before, whatever the opening.

        A parallel sample that differs from `parent` only in its asides makes other messages.
        """
        return any((parent and parent.asides) in request.answered_after for request in self._of(key))

    def has_recorded(self, key: Key, bodies: Iterable[bytes]) -> bool:
        """Return whether a request with one of these bodies, and the head and tools of `key`, was answered before."""
        return any(request.answered_after for body in bodies for request in self._of(replace(key, body=body)))

    def change_of(self, key: Key) -> ForkReason | None:
        """Return how a request differs from an answered one with the same body, or None."""
        requests = self._by_body.get(key.body, ()) if key.body else ()
        return _change_between(key, (request.key for request in requests if request.answered_after))

    def _of(self, key: Key) -> Iterable[_Seen]:
        return (request for request in self._by_body.get(key.body, ()) if request.key == key)


def _change_between(key: Key, others: Iterable[Key]) -> ForkReason | None:
    """Return what alone differs between `key` and one of `others` with the same body: tools or system messages."""
    reason = None
    for other in others:
        if other.head == key.head and other.tools != key.tools:
            return ForkReason.TOOLS_CHANGED
        if other.tools == key.tools and other.head != key.head:
            reason = ForkReason.SYSTEM_CHANGED
    return reason
