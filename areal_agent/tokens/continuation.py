"""The text and the tokens of a turn: what a conversation adds to the path that it continues.

::

    stand-in before the turn     head ... last messages <place of the answer>
    stand-in with the turn       head ... last messages <answer> <end> bridge, new messages <place of the next answer>
                                 ────── the same ──────  └ block ┘ └─────────── tokenised: the new tokens ───────────

The cost is that of the new messages, however long the history: a stand-in has a bounded length. Owns the proof that
sampled tokens may be used again. When the template strips the thinking of earlier answers, the turn leaves the path
where the first stripped answer begins. Knows nothing of how an answer is recognised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from areal_agent.errors import RequestError
from areal_agent.tokens.canonical import split_thinking
from areal_agent.tokens.prompt import Answer, Prompt, TextHash
from areal_agent.tokens.renderer import Renderer
from areal_agent.tokens.stand_in import StandIn
from areal_agent.tokens.walk import Walk, live_thinking, walk_answers, with_thinking
from areal_agent.types import ForkReason, JsonObject

Normalise = Callable[[JsonObject, int], JsonObject]
"""A raw message and its place among the messages, to the normalised message. Raises RequestError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """What a turn adds to a path: its tokens up to the place of the answer, and what the template opens there."""

    fork_at: int
    new_ids: list[int]
    opened: str
    text_hash: TextHash
    stand_in: StandIn
    fork_reason: ForkReason | None = None


class Continuation:
    """Extends paths of one session under one set of tools."""

    def __init__(self, renderer: Renderer, tools: Sequence[JsonObject]) -> None:
        self._renderer = renderer
        self._tools = renderer.tool_forms(tools)

    def root(self, messages: Sequence[JsonObject]) -> Extension:
        """A path of its own, of normalised messages. Raises RequestError when the template refuses them."""
        stand_in = self._whole([self._renderer.form(message) for message in messages])
        history, opened = self._renderer.split_opened(stand_in.text)
        return Extension(
            fork_at=0,
            new_ids=self._renderer.ids_of(history),
            opened=opened,
            text_hash=TextHash(history.encode()),
            stand_in=stand_in,
        )

    def extend(
        self, parent: Answer, echo: JsonObject, new: Sequence[JsonObject], normalise: Normalise
    ) -> Extension | None:
        """Continue `parent`, which came back as `echo`, with new messages; None when the template rewrites its path.

        Raises RequestError when the template refuses the conversation.
        """
        added = [self._answer_form(parent, echo), *(self._renderer.form(message) for message in new)]
        short = self._short(parent.prompt.stand_in)
        if short is not None:
            extension = self._extend(parent, short, added)
            if extension is not None or short.is_whole:
                return extension
        whole = self._whole(self._forms(parent.prompt, normalise), may_cut=short is None)
        return self._extend(parent, whole, added)

    def is_proved(self, prompt: Prompt, normalise: Normalise) -> bool:
        """Render the whole conversation of a prompt: is it, character by character, what its turns added?"""
        try:
            text = self._render(self._forms(prompt, normalise))
        except RequestError:
            return False  # the template refuses what it wrote a part of
        history, _ = self._renderer.split_opened(text)
        return prompt.text_hash is not None and TextHash(history.encode()).digest() == prompt.text_hash.digest()

    # ---------------------------------------------------------------------------------------------- one turn

    def _extend(self, parent: Answer, before: StandIn, added: Sequence[JsonObject]) -> Extension | None:
        try:
            text = self._render([*before.messages, *added])
        except RequestError:
            if before.is_whole:
                raise
            return None
        walk = walk_answers(self._renderer, [parent], before.text, text)
        if walk is None:
            walk = self._walk_from_stripped(parent, before, text)
        if walk is None:
            return None
        text_hash = _text_hash(walk, before)
        if text_hash is None:
            return None
        return Extension(
            fork_at=walk.fork_at,
            new_ids=walk.new_ids,
            opened=walk.opened,
            text_hash=text_hash,
            stand_in=before.grown(added, text),
            fork_reason=ForkReason.TEMPLATE_STRIPS_THINKING if walk.has_stripped else None,
        )

    def _walk_from_stripped(self, parent: Answer, before: StandIn, text: str) -> Walk | None:
        """Go back to the first answer on the path whose thinking is no longer in the text."""
        first = next((one for one in live_thinking(parent) if self._renderer.probe(one.number) not in text), None)
        if first is None:
            return None
        index = before.index_of(num_back=parent.prompt.num_messages - first.prompt.num_messages)
        if index is None:
            return None
        lineage = list(parent.lineage())
        answers = lineage[lineage.index(first) :: -1]
        if [message["role"] for message in before.messages[index:]].count("assistant") + 1 != len(answers):
            return None  # the agent put answers of its own among them
        return walk_answers(self._renderer, answers, self._render(before.messages[:index]), text)

    # --------------------------------------------------------------------------------------- forms and stand-ins

    def _render(self, forms: Sequence[JsonObject]) -> str:
        return self._renderer.text_of_forms(forms, self._tools)

    def _whole(self, forms: Sequence[JsonObject], *, may_cut: bool = True) -> StandIn:
        return StandIn(messages=tuple(forms), text=self._render(forms), num_tail=len(forms), may_cut=may_cut)

    def _short(self, stand_in: StandIn | None) -> StandIn | None:
        """A stand-in that may be used, cut if it has become long; None if there is none."""
        if stand_in is None or not self._renderer.may_elide:
            return stand_in if stand_in and stand_in.is_whole else None
        cut = stand_in.cut()
        if cut is None:
            return stand_in
        start, end = cut
        messages = stand_in.messages[:start] + stand_in.messages[end:]
        try:
            text = self._render(messages)
        except RequestError:
            return replace(stand_in, may_cut=False)
        return StandIn(messages=messages, text=text, num_tail=min(stand_in.num_tail, len(messages) - start))

    def _forms(self, prompt: Prompt, normalise: Normalise) -> list[JsonObject]:
        """All messages of a prompt's conversation, with probes in the place of thinking."""
        forms: list[JsonObject] = []
        for one in prompt.lineage():
            for message in one.delta:
                normalised = normalise(message, len(forms))
                is_echo = message is one.delta[0] and one.parent is not None
                forms.append(
                    self._answer_form(one.parent, normalised)
                    if is_echo and one.parent
                    else self._renderer.form(normalised)
                )
        return forms

    def _answer_form(self, answer: Answer, echo: JsonObject) -> JsonObject:
        if not answer.has_thinking:
            return self._renderer.form(echo)
        _, content = split_thinking(echo)
        form = dict(self._renderer.form({**echo, "content": content, "reasoning_content": None}))
        del form["reasoning_content"]
        return {**form, "content": with_thinking(self._renderer.probe(answer.number), form["content"])}


def _text_hash(walk: Walk, before: StandIn) -> TextHash | None:
    """The hash of all text up to the place of the next answer; None when that of the old text is gone."""
    if before.is_whole:
        return TextHash((walk.kept_text + walk.added_text).encode())
    if walk.first.prompt.text_hash is None:
        return None
    text_hash = walk.first.prompt.text_hash.copy()
    text_hash.update(walk.added_text.encode())
    return text_hash
