"""Prompt and Answer: the two kinds of node in a session's forest, and Reply, which becomes an Answer.

::

    Prompt ─▶ Answer ─▶ Prompt ─▶ Answer      a prompt keeps the first `fork_at` tokens of its parent's path and adds
                   └──▶ Prompt ─▶ Answer      its own; an answer adds what was sampled

Each node holds only what it adds, packed: a path is put together when it is asked for. They know no text and no rules.

A short conversation in the place of a long one: what the template writes at the end of both is the same.

Rendering a whole history for each turn costs time in proportion to it. Most of it can be left out: whole periods of a
tool loop or of a chat are cut from the middle, so that the messages on both sides of the cut fit together as before.
What a template writes at the end depends on the head (system message, tools, first question) and on the last messages.
This is true of the templates in use, not of all that can be written, so texts made this way are audited (`tree.py`).
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from areal_agent.types import ForkReason, JsonObject

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


TextHash = blake2b
"""The running hash of a conversation's text, extended by each turn with the text that it adds."""


def packed(token_ids: Sequence[int]) -> "array[int]":
    """Token ids in 4 bytes each. What is packed already stays as it is: nobody changes it."""
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Identifies messages and tools as data: the system messages at the head, all that follows, the tools."""

    head: bytes
    body: bytes
    tools: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A completion as it is sent to the agent: what a later request must repeat to continue it."""

    completion_id: str
    token_ids: Sequence[int]
    message: JsonObject  # normalised: see `canonical`
    has_thinking: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class Answer:
    """A completion in the forest: a node under which turns may continue."""

    completion_id: str
    prompt: "Prompt" = field(repr=False)
    sampled: "array[int]" = field(repr=False)
    body: bytes  # identifies the body of the conversation that ends with it
    call_ids: tuple[str, ...]
    reasoning: bytes | None  # digest of it
    has_thinking: bool
    number: int  # among the answers of its forest
    num_continuations: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.sampled)

    @property
    def path_length(self) -> int:
        """Number of tokens from the root to the end of this completion."""
        return self.prompt.num_tokens + len(self.sampled)

    @property
    def block(self) -> "array[int]":
        """What stands for the answer in later prompts: what its prompt opened for it, and what was sampled."""
        return self.prompt.new[len(self.prompt.new) - self.prompt.num_opened :] + self.sampled

    def continued(self) -> None:
        """A turn that continues it has been recorded."""
        if not self.num_continuations:
            self.prompt.num_waiting -= 1
            if not self.prompt.num_waiting:
                self.prompt.forget_text(is_last=not self.has_thinking)
        self.num_continuations += 1

    def lineage(self) -> Iterator["Answer"]:
        """This answer and those before it, newest first."""
        answer: Answer | None = self
        while answer is not None:
            yield answer
            answer = answer.prompt.parent


@dataclass(kw_only=True, slots=True, eq=False)
class Prompt:
    """A request's place in the forest: the completion that it continues and the tokens that it adds."""

    parent: Answer | None
    fork_at: int  # how many tokens of the parent's path it keeps
    new: "array[int]" = field(repr=False)
    num_opened: int = 0  # the last ones of `new` belong to the answer's block: thinking or a tool call, opened for it
    opened: str = ""  # the thinking that the template opens for the answer
    opening: str = ""  # what the answer was made to begin with, behind that
    is_thinking: bool = False  # it ends inside an opened <think>
    fork_reason: ForkReason | None  # what is known before the turn is recorded
    key: Key
    num_repeats: int = 0  # how many earlier requests of this session had the same messages, tools and opening
    num_messages: int
    delta: tuple[JsonObject, ...] = field(repr=False)  # the parent's answer as it came back, and what follows it; raw
    depth: int = 1  # turns from the root
    next_audit: int = 0  # the depth at which its text is to be proved again
    stand_in: StandIn | None = field(repr=False)  # until all its answers were continued
    text_hash: TextHash | None = field(repr=False)  # of the text up to the answer's block; as long as it may be needed
    num_waiting: int = 0  # answers that nothing continues yet
    known_path: "array[int] | None" = field(default=None, repr=False)  # as long as the forest lets it be known
    sent: Sequence[JsonObject] | str | None = field(default=None, repr=False)  # the whole request, until it is recorded

    @property
    def new_ids(self) -> tuple[int, ...]:
        return tuple(self.new)

    @property
    def new_messages(self) -> tuple[JsonObject, ...]:
        """The messages, as sent, that the parent's conversation did not have; none for a plain completion."""
        return self.delta[1:] if self.parent else self.delta

    @property
    def num_tokens(self) -> int:
        return self.fork_at + len(self.new)

    @property
    def block_at(self) -> int:
        """Where the block of its answers begins."""
        return self.num_tokens - self.num_opened

    @property
    def identity(self) -> bytes:
        """Equal for equal requests, in every run: messages, tools, opening, and which repetition it is."""
        return self.key.head + self.key.body + self.key.tools + self.num_repeats.to_bytes(8) + self.opening.encode()

    def forget_text(self, *, is_last: bool) -> None:
        """All answers were continued. Where thinking may be stripped later, turns will go back to this prompt."""
        self.stand_in = None
        if is_last:
            self.text_hash = None

    def token_ids(self) -> tuple[int, ...]:
        """The full prompt, from the root."""
        return tuple(self.path())

    def path(self) -> "array[int]":
        """As `token_ids`, packed, and not to be changed: it is made once."""
        if self.known_path is None:
            self.known_path = self._path()
        return self.known_path

    def _path(self) -> "array[int]":
        slices, kept = [self.new], self.fork_at
        for answer in self.parent.lineage() if self.parent else ():
            prompt = answer.prompt
            if prompt.known_path is not None:
                slices += [answer.sampled[: max(0, kept - prompt.num_tokens)], prompt.known_path[:kept]]
                break
            if kept > prompt.num_tokens:
                slices.append(answer.sampled[: kept - prompt.num_tokens])
            if kept > prompt.fork_at:
                slices.append(prompt.new[: kept - prompt.fork_at])
            kept = min(kept, prompt.fork_at)
        return array("i", b"".join(reversed(slices)))

    def lineage(self) -> list["Prompt"]:
        """The prompts from the root to this one."""
        older = [answer.prompt for answer in self.parent.lineage()] if self.parent else []
        return [*reversed(older), self]

    def messages(self) -> list[JsonObject]:
        """The whole conversation, as it was sent first."""
        return [message for prompt in self.lineage() for message in prompt.delta]
