"""The forest of one session's turns: which recorded completion a request continues, and what is new in its prompt.

Identity is causal. A request belongs under a completion because it repeats, as data, the whole conversation up to and
including that answer; never because of when it came. So concurrent calls, repeated prompts and edited histories
become branches, each with its reason. Owns the proof that sampled tokens may be reused; knows nothing of HTTP, of
sampling, and of rewards.

::

    u1 ─▶ [c1] ─ u2 ─▶ [c2] ─ u3 ─▶ [c3]      a root, continued twice
                    └▶ [c4]                   the same prompt again: a branch at c1, `edited`
          [c1] ─ u2' ─▶ [c5]                  another second message: a branch at c1, `edited`
    x1 ─▶ [c6]                                nothing recorded is a prefix: `new_conversation`
"""

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from areal_agent.tokens.canonical import conversation_keys, digest, extended_key, tools_key
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason, JsonObject


@dataclass(kw_only=True, slots=True, eq=False)
class Answer:
    """A completion in the forest: a node under which turns may continue."""

    completion_id: str
    prompt: "Prompt" = field(repr=False)
    token_ids: tuple[int, ...]
    marker: str  # stands for the sampled tokens in rendered text
    call_ids: tuple[str, ...]
    has_thinking: bool
    num_continuations: int = 0

    @property
    def path_length(self) -> int:
        """Number of tokens from the root to the end of this completion."""
        return self.prompt.num_tokens + len(self.token_ids)

    def lineage(self) -> Iterator["Answer"]:
        """This answer and those before it, newest first."""
        answer: Answer | None = self
        while answer is not None:
            yield answer
            answer = answer.prompt.parent


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prompt:
    """A request's place in the forest: the completion that it continues and the tokens that it adds."""

    parent: Answer | None
    fork_at: int  # number of tokens up to the end of the parent
    new_ids: tuple[int, ...]
    fork_reason: ForkReason | None  # what is known before the turn is recorded
    num_messages: int
    conversation_key: bytes
    tools_key: bytes
    num_repeats: int  # how many earlier requests of this session had the same messages and tools
    text_length: int
    text_digest: bytes

    @property
    def num_known_messages(self) -> int:
        """How many of the messages belong to the turns before."""
        return self.parent.prompt.num_messages + 1 if self.parent else 0

    @property
    def num_tokens(self) -> int:
        return self.fork_at + len(self.new_ids)

    def token_ids(self) -> tuple[int, ...]:
        """The full prompt, from the root."""
        slices = [self.new_ids]
        for answer in self.parent.lineage() if self.parent else ():
            slices += (answer.token_ids, answer.prompt.new_ids)
        return tuple(chain.from_iterable(reversed(slices)))

    @property
    def identity(self) -> bytes:
        """Equal for equal requests, in every run: messages and tools, and which repetition it is."""
        return self.conversation_key + self.tools_key + self.num_repeats.to_bytes(8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A completion as it is sent to the agent: what a later request must repeat to continue it."""

    completion_id: str
    token_ids: tuple[int, ...]
    message: JsonObject  # normalised: see `canonical`
    has_thinking: bool = False


@dataclass(kw_only=True, slots=True)
class _Seen:
    requests: Counter[tuple[bytes, bytes]] = field(default_factory=Counter[tuple[bytes, bytes]])
    recorded: set[tuple[bytes, bytes]] = field(default_factory=set[tuple[bytes, bytes]])
    conversations: set[bytes] = field(default_factory=set[bytes])


class Forest:
    """All turns of one session. `plan` places a request, `record` adds its answers; memory grows with new tokens only.

    >>> forest = Forest(renderer)                                                   # doctest: +SKIP
    >>> prompt = forest.plan(messages, tools)                                       # doctest: +SKIP
    >>> forest.record(prompt, [Reply(completion_id="c1", token_ids=ids, message=message)])      # doctest: +SKIP
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._secret = secrets.token_hex(16)  # makes markers that no message can contain
        self._num_answers = 0
        self._answers: dict[bytes, list[Answer]] = {}  # by the key of the conversation that ends with them
        self._seen = _Seen()

    def plan(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject]) -> Prompt:
        """Place a request: the longest recorded prefix whose tokens can be reused, and the ids of what follows.

        Raises RequestError when the chat template refuses the messages.
        """
        keys = conversation_keys(messages)
        definitions = tools_key(tools)
        parent, reason = self._find_parent(messages, keys, definitions)
        continuation = self._continue(parent, messages, tools) if parent else None
        if continuation is None:
            reason = ForkReason.TEMPLATE_REWRITES_HISTORY if parent else reason
            parent = None
            text = self._renderer.render(messages, tools)
            new_ids = self._renderer.ids_of(text)
        else:
            text, new_ids = continuation
        num_repeats = self._seen.requests[keys[-1], definitions]
        self._seen.requests[keys[-1], definitions] += 1
        return Prompt(
            parent=parent,
            fork_at=parent.path_length if parent else 0,
            new_ids=tuple(new_ids),
            fork_reason=reason,
            num_messages=len(messages),
            conversation_key=keys[-1],
            tools_key=definitions,
            num_repeats=num_repeats,
            text_length=len(text),
            text_digest=digest(text.encode()),
        )

    def record(self, prompt: Prompt, replies: Sequence[Reply]) -> ForkReason | None:
        """Add the answers of a placed request; tells why its turn is a fork, None if it is none."""
        reason = prompt.fork_reason or self._fork_reason(prompt)
        self._seen.recorded.add((prompt.conversation_key, prompt.tools_key))
        self._seen.conversations.add(prompt.conversation_key)
        if prompt.parent:
            prompt.parent.num_continuations += 1
        for reply in replies:
            self._add(prompt, reply)
        return reason

    def _find_parent(
        self, messages: Sequence[JsonObject], keys: Sequence[bytes], definitions: bytes
    ) -> tuple[Answer | None, ForkReason | None]:
        reason = None
        for key in reversed(keys):
            answers = self._answers.get(key, ())
            same_tools = [answer for answer in answers if answer.prompt.tools_key == definitions]
            if same_tools:
                return _best_match(same_tools, messages), None
            if answers:
                reason = ForkReason.TOOLS_CHANGED
        return None, reason

    def _continue(
        self, parent: Answer, messages: Sequence[JsonObject], tools: Sequence[JsonObject]
    ) -> tuple[str, list[int]] | None:
        """Text of the conversation and ids of what follows `parent`; None when the template rewrote the history."""
        marked = list(messages)
        thinking: list[int] = []
        for answer in parent.lineage():
            position = answer.prompt.num_messages
            marked[position] = {"role": "assistant", "content": answer.marker}
            if answer.has_thinking:
                thinking.append(position)
        text = self._renderer.render(marked, tools)
        old_length = parent.prompt.text_length
        is_prefix = (
            text.startswith(parent.marker, old_length)
            and digest(text[:old_length].encode()) == parent.prompt.text_digest
        )
        if not is_prefix or self._renderer.strips_thinking(marked, tools, thinking):
            return None
        return text, self._renderer.ids_after(parent.token_ids, text[old_length + len(parent.marker) :])

    def _fork_reason(self, prompt: Prompt) -> ForkReason | None:
        if prompt.parent:
            return ForkReason.EDITED if prompt.parent.num_continuations else None
        if not self._seen.recorded:
            return None
        if (prompt.conversation_key, prompt.tools_key) in self._seen.recorded:
            return ForkReason.EDITED
        if prompt.conversation_key in self._seen.conversations:
            return ForkReason.TOOLS_CHANGED
        return ForkReason.NEW_CONVERSATION

    def _add(self, prompt: Prompt, reply: Reply) -> None:
        self._num_answers += 1
        answer = Answer(
            completion_id=reply.completion_id,
            prompt=prompt,
            token_ids=reply.token_ids,
            marker=f"{self._secret}{self._num_answers:08x}",
            call_ids=_call_ids(reply.message),
            has_thinking=reply.has_thinking,
        )
        self._answers.setdefault(extended_key(prompt.conversation_key, reply.message), []).append(answer)


def _best_match(answers: Sequence[Answer], messages: Sequence[JsonObject]) -> Answer:
    """Of several answers that say the same: the one whose tool-call ids are repeated, then the least continued."""
    if len(answers) == 1:
        return answers[0]
    repeated = [answer for answer in answers if _are_ids_repeated(answer, messages)]
    return min(repeated or answers, key=lambda answer: answer.num_continuations)


def _are_ids_repeated(answer: Answer, messages: Sequence[JsonObject]) -> bool:
    return all(ancestor.call_ids == _call_ids(messages[ancestor.prompt.num_messages]) for ancestor in answer.lineage())


def _call_ids(message: JsonObject) -> tuple[str, ...]:
    return tuple(call.get("id", "") for call in message.get("tool_calls") or ())
