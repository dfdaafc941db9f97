"""The nodes of a session's forest, and the short conversations that stand in for long ones.

::

    Prompt ─▶ Answer ─▶ Prompt ─▶ Answer      a prompt keeps the first `fork_at` tokens of its parent's path and adds
                   └──▶ Prompt ─▶ Answer      its own; an answer adds what was sampled

Each node holds only what it adds, packed in 4 bytes a token; a path is assembled when it is needed. Ids below 0 are
tokens of images (`vision.py`).

Rendering the whole history for each turn would take time proportional to its length. A `StandIn` avoids this: whole
periods of a tool loop or of a chat are cut from its middle, so that the messages on both sides of the cut fit together
as before. What a template writes at the end depends on the head (system message, tools, first question) and on the last
messages. This holds for the templates in use, not for every possible one, so the forest audits such texts.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_agent.tokens.canonical import Asides
from areal_agent.types import ForkReason, JsonObject, record

MAX_MESSAGES = 14
"""A longer stand-in is cut before it grows."""

MIN_TAIL = 4
"""The number of last messages that are never cut."""

NEAR_USER = 8
"""The last user message is kept if it is among this many last messages: thinking is often kept from there on."""


def packed(token_ids: Sequence[int]) -> "array[int]":
    """Return token ids in 4 bytes each. Ids that are packed already are not copied, because nobody changes them."""
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """The key of messages and tools as data: the system messages at the head, the body that follows, and the tools."""

    head: bytes
    body: bytes
    tools: bytes


@record
class Reply:
    """A completion as it is sent to the agent; a later request must repeat it to continue it."""

    completion_id: str
    token_ids: Sequence[int]
    message: JsonObject  # normalised: see `canonical`
    own_ids: tuple[str | None, ...] = ()  # the ids that the model gave its calls, where its format has any
    has_thinking: bool = False
    stop_text: str = ""  # the stop text that ended it: sampled, not in the message, and perhaps added by the agent


@dataclass(kw_only=True, slots=True, eq=False)
class Answer:
    """A completion in the forest, which later prompts may continue."""

    completion_id: str
    prompt: "Prompt" = field(repr=False)
    sampled: "array[int]" = field(repr=False)
    body: bytes  # the key of the body of the conversation that ends with it
    call_ids: tuple[str, ...]  # as the agent has them
    own_ids: tuple[str | None, ...]  # as the model wrote them
    asides: Asides
    has_thinking: bool
    number: int  # its number among the answers of the forest, from 1
    num_continuations: int = 0

    @property
    def path_length(self) -> int:
        """The number of tokens from the root to the end of this completion."""
        return self.prompt.num_tokens + len(self.sampled)

    @property
    def block(self) -> "array[int]":
        """The answer's tokens in later prompts: those that its prompt opened for it, and the sampled ones."""
        return self.prompt.new_ids[len(self.prompt.new_ids) - self.prompt.num_opened :] + self.sampled

    def continued(self) -> None:
        """Count a recorded turn that continues this answer."""
        if not self.num_continuations:
            self.prompt.num_waiting -= 1
            if not self.prompt.num_waiting:
                self.prompt.stand_in = None
        self.num_continuations += 1

    def lineage(self) -> Iterator["Answer"]:
        """Yield this answer and those before it, newest first."""
        answer: Answer | None = self
        while answer is not None:
            yield answer
            answer = answer.prompt.parent


@dataclass(kw_only=True, slots=True, eq=False)
class Prompt:
    """A request's place in the forest: the completion that it continues and the tokens that it adds."""

    parent: Answer | None
    fork_at: int  # the number of tokens of the parent's path that it keeps
    new_ids: "array[int]" = field(repr=False)
    slices: tuple[
        tuple[int, int], ...
    ] = ()  # the parts of `new_ids` that were sampled, in answers whose thinking is gone
    num_opened: int = 0  # the last of `new_ids` that belong to the answer: thinking or a tool call, opened for it
    opened: str = ""  # the thinking that the template opens for the answer
    opening: str = ""  # the text that the answer must begin with, after `opened`
    is_thinking: bool = False  # it ends inside an opened <think>
    fork_reason: ForkReason | None  # as known before the turn is recorded
    key: Key
    num_repeats: int = 0  # earlier requests of this session with the same messages, tools and opening
    num_messages: int
    delta: tuple[JsonObject, ...] = field(repr=False)  # the parent's answer as it came back, and what follows it; raw
    depth: int = 1  # turns from the root
    next_audit: int = 0  # the depth at which its text is to be proved again
    stand_in: "StandIn | None" = field(repr=False)  # until all its answers were continued
    num_waiting: int = 0  # answers that nothing continues yet
    known_path: "array[int] | None" = field(default=None, repr=False)  # the whole path, while the forest keeps it
    sent: Sequence[JsonObject] | str | None = field(default=None, repr=False)  # the whole request, until it is recorded

    @property
    def new_messages(self) -> tuple[JsonObject, ...]:
        """The messages, as sent, that the parent's conversation did not have; none for a plain completion."""
        return self.delta[1:] if self.parent else self.delta

    @property
    def num_tokens(self) -> int:
        return self.fork_at + len(self.new_ids)

    @property
    def block_at(self) -> int:
        """The position in the path at which its answers' blocks begin."""
        return self.num_tokens - self.num_opened

    @property
    def identity(self) -> bytes:
        """Return equal bytes for equal requests, in every run: messages, tools, opening, number of the repetition."""
        return self.key.head + self.key.body + self.key.tools + self.num_repeats.to_bytes(8) + self.opening.encode()

    def path(self) -> "array[int]":
        """Return the full prompt, from the root, packed. It is assembled once; do not change it."""
        if self.known_path is None:
            self.known_path = self._path()
        return self.known_path

    def _path(self) -> "array[int]":
        slices: list[array[int] | memoryview] = [self.new_ids]
        kept = self.fork_at
        for answer in self.parent.lineage() if self.parent else ():
            prompt = answer.prompt
            if prompt.known_path is not None:
                slices += [answer.sampled[: max(0, kept - prompt.num_tokens)], memoryview(prompt.known_path)[:kept]]
                break
            if kept > prompt.num_tokens:
                slices.append(answer.sampled[: kept - prompt.num_tokens])
            if kept > prompt.fork_at:
                slices.append(prompt.new_ids[: kept - prompt.fork_at])
            kept = min(kept, prompt.fork_at)
        return array("i", b"".join(reversed(slices)))

    def lineage(self) -> list["Prompt"]:
        """Return the prompts from the root to this one."""
        older = [answer.prompt for answer in self.parent.lineage()] if self.parent else []
        return [*reversed(older), self]

    def sampled_spans(self) -> list[tuple[int, int]]:
        """Return the places `[start, end)` of the path that hold answers, with what was opened for them."""
        spans: list[tuple[int, int]] = []
        for prompt in self.lineage():
            if prompt.parent:
                spans.append((prompt.parent.prompt.block_at, prompt.parent.path_length))
            if spans and spans[-1][1] > prompt.fork_at:
                spans = [(start, min(end, prompt.fork_at)) for start, end in spans if start < prompt.fork_at]
            spans += [(prompt.fork_at + start, prompt.fork_at + end) for start, end in prompt.slices]
        return spans

    def messages(self) -> list[JsonObject]:
        """Return the whole conversation, as it was first sent."""
        return [message for prompt in self.lineage() for message in prompt.delta]


Shape = tuple[Any, ...]
"""One message without its words: its role, and which parts it has (`arrangement.shapes_of`)."""


@record
class StandIn:
    """Messages that stand for a conversation, and their text up to the place where the model answers."""

    messages: tuple[JsonObject, ...]
    shapes: tuple[Shape, ...]
    text: str
    num_tail: int  # the number of last messages that are the conversation's own last ones
    may_cut: bool = True

    @property
    def is_whole(self) -> bool:
        """Return whether nothing was cut."""
        return self.num_tail == len(self.messages)

    def grown(self, added: Sequence[JsonObject], shapes: tuple[Shape, ...], text: str) -> "StandIn":
        """Return this stand-in with `added` messages; `shapes` and `text` are those of all of them."""
        messages, num_tail = (*self.messages, *added), self.num_tail + len(added)
        return StandIn(messages=messages, shapes=shapes, text=text, num_tail=num_tail, may_cut=self.may_cut)

    def cut(self) -> tuple[int, int] | None:
        """Return the messages `[i, j)` to leave out, or None if it is short enough or must not be cut."""
        return (
            longest_cut(list(map(_kind, self.messages))) if self.may_cut and len(self.messages) > MAX_MESSAGES else None
        )

    def index_of(self, *, num_back: int) -> int | None:
        """Return the index of the message `num_back` before the end, or None if it may have been cut."""
        return len(self.messages) - num_back if num_back <= self.num_tail else None


def longest_cut(kinds: Sequence[tuple[Any, ...]]) -> tuple[int, int] | None:
    """Return the longest stretch `[i, j)` of messages of these kinds that can be left out, or None.

    A kind begins with the role of its message.

    >>> longest_cut([("user",), *[("assistant",), ("tool",)] * 6])
    (3, 9)
    """
    roles = [kind[0] for kind in kinds]
    first, last = _head_length(roles), _tail_start(roles)
    for start in range(first, last):
        if roles[start] == "tool":
            continue  # results stay with their call
        for end in range(last, start, -1):
            if kinds[start] == kinds[end] and kinds[start - 1] == kinds[end - 1]:
                return start, end
    return None


def _kind(message: JsonObject) -> tuple[Any, ...]:
    return message["role"], bool(message.get("tool_calls"))


def _head_length(roles: Sequence[str]) -> int:
    """Return the length of the head, which includes the first user message."""
    return roles.index("user") + 1 if "user" in roles else 1


def _tail_start(roles: Sequence[str]) -> int:
    last_user = max((n for n, role in enumerate(roles) if role == "user"), default=0)
    start = len(roles) - MIN_TAIL
    return min(start, last_user) if last_user >= len(roles) - NEAR_USER else start
