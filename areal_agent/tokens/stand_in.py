"""A short conversation in the place of a long one: what the template writes at the end of both is the same.

Rendering a whole history for each turn costs time in proportion to it. Most of it can be left out: whole periods of a
tool loop or of a chat are cut from the middle, so that the messages on both sides of the cut fit together as before.
What a template writes behind depends on the head (system message, tools, first question) and on the last messages. This
is true of the templates in use, not of all that can be written: so texts made this way are audited (forest.py).
Knows messages in the form of the template, and no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_agent.types import JsonObject

MAX_MESSAGES = 14
"""A longer stand-in is cut before it grows."""

MIN_TAIL = 4
NEAR_USER = 8
"""The last user message stays when it is among so many last messages: thinking is often kept from there on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StandIn:
    """Messages that stand for a conversation, and their text up to the place where the model answers."""

    messages: tuple[JsonObject, ...]
    text: str
    num_tail: int  # so many last messages are the conversation's own last ones
    may_cut: bool = True

    @property
    def is_whole(self) -> bool:
        """Nothing was cut."""
        return self.num_tail == len(self.messages)

    def grown(self, added: Sequence[JsonObject], text: str) -> "StandIn":
        """With more messages, and the text of all."""
        return StandIn(
            messages=(*self.messages, *added),
            text=text,
            num_tail=self.num_tail + len(added),
            may_cut=self.may_cut,
        )

    def cut(self) -> tuple[int, int] | None:
        """The stretch `[i, j)` of messages to leave out; None when it is short enough, or should not be cut."""
        return longest_cut(self.messages) if self.may_cut and len(self.messages) > MAX_MESSAGES else None

    def index_of(self, *, num_back: int) -> int | None:
        """Where the message stands that is `num_back` before the end; None when it may have been cut."""
        return len(self.messages) - num_back if num_back <= self.num_tail else None


def longest_cut(messages: Sequence[JsonObject]) -> tuple[int, int] | None:
    """The longest stretch `[i, j)` that can be left out, or None.

    >>> loop = [{"role": "user"}, *[{"role": "assistant"}, {"role": "tool"}] * 6]
    >>> longest_cut(loop)
    (3, 9)
    """
    kinds = [_kind(message) for message in messages]
    first, last = _head_length(kinds), _tail_start(kinds)
    for start in range(first, last):
        if kinds[start] == "tool":
            continue  # results stay with their call
        for end in range(last, start, -1):
            if kinds[start] == kinds[end] and kinds[start - 1] == kinds[end - 1]:
                return start, end
    return None


def _kind(message: JsonObject) -> str:
    return message["role"] + ("+calls" if message.get("tool_calls") else "")


def _head_length(kinds: Sequence[str]) -> int:
    """Through the first user message at least."""
    return kinds.index("user") + 1 if "user" in kinds else 1


def _tail_start(kinds: Sequence[str]) -> int:
    last_user = max((n for n, kind in enumerate(kinds) if kind == "user"), default=0)
    start = len(kinds) - MIN_TAIL
    return min(start, last_user) if last_user >= len(kinds) - NEAR_USER else start
