"""The newest conversations of a session in the form in which they were sent: to recognise one as Python compares lists.

A request nearly always repeats a conversation to the letter, with an answer and a few messages more. Then nothing of
its history needs to be normalised and hashed. Whatever is not recognised here is found by its data, in the forest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from areal_agent.tokens.prompt import Prompt
from areal_agent.types import JsonObject


@dataclass(kw_only=True, slots=True, eq=False)
class Line:
    """A conversation as it was sent, up to its newest prompt. It grows; who leaves it begins another."""

    tip: Prompt
    messages: list[JsonObject]

    def begins(self, messages: Sequence[JsonObject]) -> bool:
        """Whether `messages` begin with this conversation."""
        length = len(self.messages)
        return (
            len(messages) >= length
            and messages[length - 1] == self.messages[-1]  # tells most conversations apart at once
            and list(messages[:length]) == self.messages
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What the newest search came to: its request is nearly always the next to be recorded."""

    messages: Sequence[JsonObject]
    tip: Prompt  # of the line that was found


class Lines:
    """The `max_lines` conversations that went on last, the newest first."""

    def __init__(self, max_lines: int) -> None:
        self._max_lines = max_lines
        self._lines: list[Line] = []
        self._found: _Found | None = None

    def find(self, messages: Sequence[JsonObject], tools: bytes) -> Line | None:
        """The conversation that a request repeats, or continues by one answer and messages that are none."""
        for line in self._lines:
            if line.tip.key.tools == tools and line.begins(messages) and _is_next(line, messages):
                self._found = _Found(messages=messages, tip=line.tip)
                return line
        return None

    def record(self, prompt: Prompt, messages: Sequence[JsonObject]) -> None:
        """A request was answered: its line goes on, or begins."""
        line = self._line_of(prompt, messages)
        if line is not None:
            self._lines.remove(line)
        new = messages[len(line.messages) :] if line else messages
        if any(_has_numbers(message) for message in new):
            return  # Python says that 1 == True, and JSON does not
        if line is None:
            line = Line(tip=prompt, messages=_shared(prompt.messages(), messages))
        else:
            line.messages.extend(new)
            line.tip = prompt
        self._lines.insert(0, line)
        del self._lines[self._max_lines :]

    def _line_of(self, prompt: Prompt, messages: Sequence[JsonObject]) -> Line | None:
        """The line that a request repeats or continues; not the one that it leaves."""
        found, self._found = self._found, None
        keys = {prompt.key, prompt.parent.prompt.key} if prompt.parent else {prompt.key}
        for line in self._lines:
            if line.tip.key in keys:
                is_found = found is not None and found.messages is messages and found.tip is line.tip
                if is_found or line.begins(messages):
                    return line
        return None


def _is_next(line: Line, messages: Sequence[JsonObject]) -> bool:
    """Whether no answer but the tip's can be among the messages that follow it."""
    length = len(line.messages)
    if len(messages) == length:
        return not any(_is_answer(message) for message in line.tip.new_messages)
    return _is_answer(messages[length]) and not any(_is_answer(message) for message in messages[length + 1 :])


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"  # pyright: ignore[reportUnknownMemberType]


def _has_numbers(value: JsonObject | list[Any]) -> bool:
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, str) or item is None:  # asked here: a call costs more
            continue
        if not isinstance(item, (dict, list)) or _has_numbers(cast("JsonObject | list[Any]", item)):
            return True
    return False


def _shared(recorded: Sequence[JsonObject], sent: Sequence[JsonObject]) -> list[JsonObject]:
    """`sent`, with the objects that are held anyway in the place of equal ones."""
    return [old if old == new else new for old, new in zip(recorded, sent, strict=True)]
