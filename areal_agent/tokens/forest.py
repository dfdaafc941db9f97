"""The forest of one session's turns: finds the recorded answer that a request continues, and what its prompt adds.

A request continues an answer only if it repeats, as data, the whole conversation up to and including that answer; the
time of its arrival does not matter. So concurrent calls, repeated prompts and edited histories become branches, each
with its reason.

::

    u1 ─▶ [c1] ─ u2 ─▶ [c2] ─ u3 ─▶ [c3]      a root, continued twice
                    └▶ [c4]                   the same prompt again: a branch at c1, `repeated`
          [c1] ─ u2' ─▶ [c5]                  another second message: a branch at c1, `edited`
    u1 ─ a ─ u2 ─▶ [c6]                       an answer that nobody sampled: a root, `edited`
    x1 ─▶ [c7]                                nothing recorded is a prefix: `new_conversation`

Plain completions (`/v1/completions`) are placed by the text or the ids of their prompt (`Completions`).
"""

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from areal_agent.tokens.canonical import (
    DIGEST_BYTES,
    asides,
    call_ids,
    digest,
    extended_key,
    head_length,
    prefix_keys,
    tools_key,
    with_defaults,
    with_stop_text,
)
from areal_agent.tokens.continuation import Continuation, Extension, Normalise
from areal_agent.tokens.prompt import Answer, Key, Prompt, Reply, packed
from areal_agent.tokens.recognition import AnswersByData, Line, Lines, Requests, best_by_echo
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import ForkReason, JsonObject, record

logger = logging.getLogger(__name__)

FIRST_AUDIT = 20
"""The depth in turns at which a text made from stand-ins is first audited; each later audit is at twice the depth."""

MAX_LINES = 8
"""The number of conversations recognised as sent: enough for parallel sub-agents; any more are found by data."""


@record
class _Sent:
    """A request as the agent sent it."""

    messages: Sequence[JsonObject]
    tools: bytes  # the key of its tools and template options
    normalise: Normalise
    opening: str

    def normalised(self, start: int = 0) -> list[JsonObject]:
        """Return the messages from `start` on, normalised."""
        return [self.normalise(message, index) for index, message in enumerate(self.messages[start:], start)]


@record
class _Request:
    """A request that has been read: the answer that it continues, and its new messages, normalised."""

    key: Key
    parent: Answer | None
    echo: JsonObject | None  # the parent's answer as it came back
    new: Sequence[JsonObject]
    reason: ForkReason | None


class Forest:
    """All turns of one session. `plan` places a request, `record` adds its answers; memory grows with new tokens only.

    Use it from one thread at a time.

    >>> forest = Forest(renderer)                                                   # doctest: +SKIP
    >>> prompt = forest.plan(messages, tools, normalise=read_message)               # doctest: +SKIP
    >>> forest.record(prompt, [Reply(completion_id="c1", token_ids=ids, message=message)])      # doctest: +SKIP
    """

    def __init__(self, renderer: Renderer, *, max_lines: int = MAX_LINES) -> None:
        self._renderer = renderer
        self._lines = Lines(max_lines)
        self._answers = AnswersByData()
        self._requests = Requests()
        self._completions = Completions()
        self._sampled: set[bytes] = set()  # the keys of all forms of the answers, each alone
        self._continuations: dict[bytes, Continuation] = {}  # by the key of their tools and options
        self._leaves: set[Prompt] = set()  # prompts of conversations that nothing continues
        self._newest: Prompt | None = None  # only the newest recorded prompt keeps its whole path in memory
        self._normalise: Normalise = _as_it_is  # that of the newest request
        self._num_answers = 0
        self.num_mismatches = 0
        """The number of audits in which the text of a prompt's ids was not what the template writes."""

    # -------------------------------------------------------------------------------------------------- plan

    def plan(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        *,
        normalise: Normalise,
        opening: str = "",
        options: JsonObject | None = None,
        is_counted: bool = True,
    ) -> Prompt:
        """Place a request: find the longest recorded prefix whose tokens can be reused, and the ids of what follows.

        `messages` are as the agent sent them; `normalise` is called for those that are not yet known in their position.
        `opening`, the text with which the answer must begin, does not affect where the request is placed. `options` are
        more variables for the chat template. A request that will not be recorded is not counted: it leaves no trace.
        Raises RequestError when a message is wrong or the chat template refuses the messages.
        """
        self._normalise = normalise
        sent = _Sent(messages=messages, tools=tools_key(tools, options), normalise=normalise, opening=opening)
        if sent.tools not in self._continuations:
            self._continuations[sent.tools] = Continuation(self._renderer, tools, options or {})
        line = self._lines.find(messages, sent.tools)
        prompt = line and self._repeated(line, sent)
        if prompt is None:
            request = (line and self._recognise(line, sent)) or self._read(sent)
            prompt = self._place(request, sent)
        if is_counted:
            prompt.num_repeats = self._requests.add(prompt.key, prompt.opening)
        return prompt

    def plan_completion(self, prompt: str | Sequence[int]) -> Prompt:
        """Place a plain completion. It continues the longest recorded prompt and answer with which it begins."""
        place, rest = self._completions.find(prompt)
        if isinstance(rest, str):
            rest = self._renderer.ids_of(rest) if place else self._renderer.ids_of_prompt(rest)
        key = completion_key(prompt)
        return Prompt(
            parent=place.answer if place else None,
            fork_at=place.fork_at if place else 0,
            new_ids=packed(rest),
            fork_reason=None,
            key=key,
            num_repeats=self._requests.add(key),
            num_messages=0,
            delta=(),
            stand_in=None,
            sent=prompt if isinstance(prompt, str) else self._renderer.detokenizer.text_of(prompt),
        )

    def _repeated(self, line: Line, sent: _Sent) -> Prompt | None:
        """Repeat the newest request of a line, unless another answer could now be its parent."""
        tip = line.tip
        if len(sent.messages) > len(line.messages):
            return None
        if tip.parent and self._answers.of(replace(tip.key, body=tip.parent.body)) != [tip.parent]:
            return None
        prompt = replace(tip, num_waiting=0, sent=sent.messages)
        if sent.opening != tip.opening:
            self._begin_answer(prompt, sent.opening)
        return prompt

    def _recognise(self, line: Line, sent: _Sent) -> _Request | None:
        """Read a request that repeats a line exactly and continues it."""
        tip, length = line.tip, len(line.messages)
        if len(sent.messages) == length:
            return None
        echo = sent.normalise(sent.messages[length], length)
        key = Key(head=tip.key.head, body=self._answers.key_after(tip.key.body, echo), tools=tip.key.tools)
        answers = self._answers.of(key)
        if not all(_is_same_place(answer.prompt, tip) for answer in answers):
            return None
        parent = best_by_echo(answers, echo)
        if parent is None:
            return None
        new = sent.normalised(length + 1)
        body = [key.body, *prefix_keys(new, key.body)][-1]
        key = Key(head=key.head, body=body, tools=key.tools)
        return _Request(key=key, parent=parent, echo=echo, new=new, reason=None)

    def _read(self, sent: _Sent) -> _Request:
        """Read a request in full and find its parent by data."""
        normalised = sent.normalised()
        num_head = head_length(normalised)
        head = [b"", *prefix_keys(normalised[:num_head])][-1]
        bodies = [b""]
        for message in normalised[num_head:]:
            bodies.append(self._answers.key_after(bodies[-1], message))
        key = Key(head=head, body=bodies[-1], tools=sent.tools)
        parent, reason = self._answers.find(normalised, bodies, key, sent.normalise)
        if parent is None:
            reason = ForkReason.EDITED if self._requests.has_recorded(key, bodies[:-1]) else reason
            return _Request(key=key, parent=None, echo=None, new=normalised, reason=reason)
        position = parent.prompt.num_messages
        return _Request(key=key, parent=parent, echo=normalised[position], new=normalised[position + 1 :], reason=None)

    # ------------------------------------------------------------------------------------------------- place

    def _place(self, request: _Request, sent: _Sent) -> Prompt:
        """Give a request its tokens: after its parent's path if the template keeps that, else as a root."""
        continuation, parent = self._continuations[request.key.tools], request.parent
        if parent and request.echo is not None:
            extension = continuation.extend(parent, request.echo, request.new, sent.normalise, self._own(request.new))
            if extension is not None:
                prompt = self._prompt(request, parent, extension, sent)
                if not self._is_audit_due(prompt) or self._audit(prompt, sent.normalise):
                    return prompt
            request = replace(request, reason=ForkReason.TEMPLATE_REWRITES_HISTORY)
        whole = request.new if parent is None else sent.normalised()
        return self._prompt(request, None, continuation.root(whole, self._own(whole)), sent)

    def _own(self, messages: Sequence[JsonObject]) -> list[int]:
        """Return the places of the session's own answers among normalised messages."""
        answers = (index for index, message in enumerate(messages) if message["role"] == "assistant")
        return [index for index in answers if extended_key(b"", messages[index]) in self._sampled]

    def _prompt(self, request: _Request, parent: Answer | None, extension: Extension, sent: _Sent) -> Prompt:
        prompt = Prompt(
            parent=parent,
            fork_at=extension.fork_at,
            new_ids=packed(extension.new_ids),
            slices=extension.slices,
            opened=extension.opened,
            fork_reason=extension.fork_reason or request.reason,
            key=request.key,
            num_messages=len(sent.messages),
            delta=tuple(sent.messages[parent.prompt.num_messages if parent else 0 :]),
            depth=parent.prompt.depth + 1 if parent else 1,
            next_audit=parent.prompt.next_audit if parent else FIRST_AUDIT,
            stand_in=extension.stand_in,
            sent=sent.messages,
        )
        self._begin_answer(prompt, sent.opening)
        return prompt

    def _begin_answer(self, prompt: Prompt, opening: str) -> None:
        """End a prompt with the thinking that the template opens and the text that the answer must begin with."""
        opened = self._renderer.opened_before(opening, prompt.opened)
        begun = packed(self._renderer.ids_of(opened) + self._renderer.ids_of(opening))
        prompt.new_ids = prompt.new_ids[: len(prompt.new_ids) - prompt.num_opened] + begun
        prompt.num_opened = len(begun)
        prompt.opening = opening
        prompt.is_thinking = self._renderer.thinking.is_open(opened + opening)
        prompt.known_path = None

    # ------------------------------------------------------------------------------------------------ record

    def record(self, prompt: Prompt, replies: Sequence[Reply]) -> ForkReason | None:
        """Add the answers of a placed request. Return why its turn is a fork, or None if it is not one."""
        reason = self._fork_reason(prompt)
        self._requests.record(prompt.key, prompt.parent)
        sent, prompt.sent = prompt.sent, None
        if self._newest:
            self._newest.known_path = None
        self._newest = prompt
        if prompt.parent:
            prompt.parent.continued()
            self._leaves.discard(prompt.parent.prompt)
        for reply in replies:
            self._add(prompt, reply, sent)
        if sent is not None and not isinstance(sent, str):
            self._leaves.add(prompt)
            self._lines.record(prompt, sent)
        return reason

    def _fork_reason(self, prompt: Prompt) -> ForkReason | None:
        if self._requests.is_recorded(prompt.key, prompt.parent):
            return ForkReason.REPEATED
        if prompt.fork_reason:
            return prompt.fork_reason
        if prompt.parent:
            return ForkReason.EDITED if prompt.parent.num_continuations else None
        if not self._requests.num_recorded:
            return None
        return self._requests.change_of(prompt.key) or ForkReason.NEW_CONVERSATION

    def _add(self, prompt: Prompt, reply: Reply, sent: Sequence[JsonObject] | str | None) -> None:
        self._num_answers += 1
        answer = Answer(
            completion_id=reply.completion_id,
            prompt=prompt,
            sampled=packed(reply.token_ids),
            body=self._answers.key_after(prompt.key.body, reply.message),
            call_ids=call_ids(reply.message),
            own_ids=reply.own_ids,
            asides=asides(reply.message),
            has_thinking=reply.has_thinking,
            number=self._num_answers,
        )
        prompt.num_waiting += 1
        if isinstance(sent, str):
            self._completions.add(answer, sent, self._renderer)
        else:
            tools = self._continuations[prompt.key.tools].tools
            forms = with_stop_text(reply.message, reply.stop_text) + with_defaults(reply.message, tools)
            self._sampled.update(extended_key(b"", form) for form in (reply.message, *forms))
            self._answers.add(answer, [extended_key(prompt.key.body, form) for form in forms])

    # ------------------------------------------------------------------------------------------------- audit

    def audit(self) -> int:
        """Render every conversation that nothing continues in full. Return the number of prompts that were wrong."""
        return sum(not self._audit(prompt, self._normalise) for prompt in self._leaves)

    def _is_audit_due(self, prompt: Prompt) -> bool:
        return prompt.stand_in is not None and not prompt.stand_in.is_whole and prompt.depth >= prompt.next_audit

    def _audit(self, prompt: Prompt, normalise: Normalise) -> bool:
        """Return whether the prompt's ids have the text that the template writes; if not, use no more stand-ins."""
        prompt.next_audit = 2 * prompt.depth
        difference = self._continuations[prompt.key.tools].difference(prompt, normalise)
        if difference is None:
            return True
        self.num_mismatches += 1
        self._renderer.may_elide = False
        if not self._renderer.is_mismatch_logged:
            self._renderer.is_mismatch_logged = True
            logger.warning("%s; from now on such turns are counted in history_mismatches alone", difference)
        return False


def _is_same_place(one: Prompt, other: Prompt) -> bool:
    """Return whether two prompts with equal keys also agree in everything that the key leaves out."""
    return one is other or (one.parent is other.parent and one.delta == other.delta)


def _as_it_is(message: JsonObject, index: int) -> JsonObject:
    del index
    return message


SCOPE = b"completion"
"""Takes the place of the tools' digest in the key of a plain completion; no conversation has it."""


def completion_key(prompt: str | Sequence[int]) -> Key:
    """Return the key of a plain completion's prompt: that of its text, or that of its ids."""
    kind, data = (b"text", prompt.encode()) if isinstance(prompt, str) else (b"ids", packed(prompt).tobytes())
    return Key(head=kind, body=digest(data), tools=SCOPE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """A place where a prompt may continue an answer: after the first `fork_at` tokens of the answer's path."""

    answer: Answer
    fork_at: int


class Completions:
    """The answered plain completions of a session, found by the text or the ids with which a prompt begins."""

    def __init__(self) -> None:
        self._by_text = _Prefixes()
        self._by_ids = _Prefixes()

    def add(self, answer: Answer, prompt_text: str, renderer: Renderer) -> None:
        """Register an answer. If it ended by itself, a prompt may continue it with or without its end token."""
        path = (*answer.prompt.path(), *answer.sampled)
        self._add(answer, path, prompt_text + renderer.text_of(answer.sampled, has_ended=False))
        if answer.sampled and answer.sampled[-1] in renderer.stop_token_ids:
            self._add(answer, path[:-1], prompt_text + renderer.text_of(answer.sampled, has_ended=True))

    def _add(self, answer: Answer, path: Sequence[int], text: str) -> None:
        place = _Place(answer=answer, fork_at=len(path))
        self._by_ids.add(packed(path).tobytes(), place)
        self._by_text.add(text.encode(), place)

    def find(self, prompt: str | Sequence[int]) -> tuple[_Place | None, str | Sequence[int]]:
        """Find the longest recorded prompt and answer with which `prompt` begins. Return its end, and what follows."""
        if isinstance(prompt, str):
            data = prompt.encode()
            length, place = self._by_text.longest(data)
            return place, data[length:].decode()
        length, place = self._by_ids.longest(packed(prompt).tobytes())
        return place, prompt[length // array("i").itemsize :]


class _Prefixes:
    """An index of places by the bytes that lead to them."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bytes], list[_Place]] = {}  # by length and digest of the bytes

    def add(self, data: bytes, place: _Place) -> None:
        self._places.setdefault((len(data), digest(data)), []).append(place)

    def longest(self, data: bytes) -> tuple[int, _Place | None]:
        """Find the longest known prefix of `data` in one pass; of several equal ones, the least continued."""
        running, position = blake2b(digest_size=DIGEST_BYTES), 0
        found: tuple[int, _Place | None] = (0, None)
        for length in sorted({length for length, _ in self._places if length <= len(data)}):
            running.update(data[position:length])
            position = length
            places = self._places.get((length, running.digest()))
            if places:
                found = (length, min(places, key=lambda place: place.answer.num_continuations))
        return found
