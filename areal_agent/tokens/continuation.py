"""The text and the tokens that a turn adds to the path that it continues.

::

    stand-in before the turn     head ... last messages <place of the answer>
    stand-in with the turn       head ... last messages <answer> <end> bridge, new messages <place of the next answer>
                                 ────── the same ──────  └ block ┘ └─────────── tokenised: the new tokens ───────────

The cost is that of the new messages, however long the history, because a stand-in has a bounded length. Sampled tokens
are reused only if the old text is proved to be a prefix of the new text. In the path an answer is all its sampled
tokens, or, where the template leaves out its thinking, those after the thinking; the rendered text shows which. When
the template strips the thinking of earlier answers, the turn leaves the path at the first stripped answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from areal_agent.errors import RequestError
from areal_agent.tokens.prompt import Answer, Prompt, StandIn, TextHash
from areal_agent.tokens.renderer import Ended, Renderer
from areal_agent.types import ForkReason, JsonObject

Normalise = Callable[[JsonObject, int], JsonObject]
"""Maps a raw message and its index among the messages to the normalised message. Raises RequestError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extension:
    """The tokens that a turn adds to a path, and the thinking that the template opens after them."""

    fork_at: int
    new_ids: list[int]
    opened: str
    text_hash: TextHash
    stand_in: StandIn
    fork_reason: ForkReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """Consecutive answers, and the text that the template wrote from the first one's place on."""

    first: Answer
    fork_at: int  # the number of tokens of the last answer's path that are kept
    new_ids: list[int]  # the tokens after them, up to the place of the next answer
    opened: str  # the thinking that the template opens for the next answer
    kept_text: str  # the text before the first answer's place
    added_text: str  # the text from there on
    has_stripped: bool


class Continuation:
    """Extends paths of one session under one set of tools and template options."""

    def __init__(self, renderer: Renderer, tools: Sequence[JsonObject], options: JsonObject) -> None:
        self.tools = tools
        """The definitions as the agent sent them."""
        self._renderer = renderer
        self._tool_forms = renderer.tool_forms(tools)
        self._options = options

    def root(self, messages: Sequence[JsonObject]) -> Extension:
        """Start a new path with normalised messages. Raises RequestError when the template refuses them."""
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
        """Continue `parent`, which came back as `echo`. Return None if the template rewrites its path.

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
        """Render the whole conversation of a prompt. Return whether it is exactly what its turns added."""
        try:
            text = self._render(self._forms(prompt, normalise))
        except RequestError:
            return False  # the template refuses the conversation, a part of which it wrote
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
        walk = _walk_answers(self._renderer, [parent], before.text, text)
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

    def _walk_from_stripped(self, parent: Answer, before: StandIn, text: str) -> _Walk | None:
        """Go back to the first answer on the path whose thinking is no longer in the text."""
        first = next((one for one in _live_thinking(parent) if self._renderer.probe(one.number) not in text), None)
        if first is None:
            return None
        index = before.index_of(num_back=parent.prompt.num_messages - first.prompt.num_messages)
        if index is None:
            return None
        lineage = list(parent.lineage())
        answers = lineage[lineage.index(first) :: -1]
        if [message["role"] for message in before.messages[index:]].count("assistant") + 1 != len(answers):
            return None  # the agent put answers of its own among them
        return _walk_answers(self._renderer, answers, self._render(before.messages[:index]), text)

    # --------------------------------------------------------------------------------------- forms and stand-ins

    def _render(self, forms: Sequence[JsonObject]) -> str:
        return self._renderer.template.render(forms, self._tool_forms, options=self._options)

    def _whole(self, forms: Sequence[JsonObject], *, may_cut: bool = True) -> StandIn:
        return StandIn(messages=tuple(forms), text=self._render(forms), num_tail=len(forms), may_cut=may_cut)

    def _short(self, stand_in: StandIn | None) -> StandIn | None:
        """Return a usable stand-in, cut if it has become long; None if there is none."""
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
        """Return all messages of a prompt's conversation, with probes in the place of thinking."""
        forms: list[JsonObject] = []
        for one in prompt.lineage():
            for message in one.delta:
                normalised = normalise(message, len(forms))
                if one.parent and message is one.delta[0]:
                    forms.append(self._answer_form(one.parent, normalised))
                else:
                    forms.append(self._renderer.form(normalised))
        return forms

    def _answer_form(self, answer: Answer, echo: JsonObject) -> JsonObject:
        """Return an echoed answer as the template receives it, with a probe in the place of its thinking."""
        if not answer.has_thinking:
            return self._renderer.form(echo)
        return self._renderer.form_with_thinking(echo, self._renderer.probe(answer.number))


def _text_hash(walk: _Walk, before: StandIn) -> TextHash | None:
    """Return the hash of all text up to the place of the next answer, or None if that of the old text was dropped."""
    if before.is_whole:
        return TextHash((walk.kept_text + walk.added_text).encode())
    if walk.first.prompt.text_hash is None:
        return None
    text_hash = walk.first.prompt.text_hash.copy()
    text_hash.update(walk.added_text.encode())
    return text_hash


def _live_thinking(answer: Answer) -> list[Answer]:
    """Return the answers on the path to `answer`, oldest first, whose thinking is still in the path."""
    found: list[Answer] = []
    kept = answer.path_length
    for one in answer.lineage():
        if one.has_thinking and one.path_length <= kept:
            found.append(one)
        kept = min(kept, one.prompt.fork_at)
    return found[::-1]


def _walk_answers(renderer: Renderer, answers: Sequence[Answer], before: str, after: str) -> _Walk | None:
    """Read `after`, the text of a conversation with these answers; `before` is its text up to the first one's place.

    Return None when the old text is not a prefix of the new one, or the answers cannot be told apart in it.
    """
    history, opened = renderer.split_opened(before)
    if not after.startswith(history):
        return None
    added, next_opened = renderer.split_opened(after[len(history) :])
    fork_at, new_ids, rest, has_stripped = answers[0].prompt.block_at, list[int](), added, False
    for answer in answers:
        written = renderer.split_at_end(rest)
        if written is None:
            return None
        following, rest = _up_to_next_answer(renderer, written, is_last=answer is answers[-1])
        if not following:
            return None
        if not _is_kept(renderer, answer, written, opened):
            has_stripped = True
            ids = _ids_after_thinking(renderer, answer, written)
        elif answer is answers[0]:
            fork_at, ids = answer.path_length, answer.sampled.tolist()
        else:
            ids = answer.block.tolist()
        bridge = renderer.ids_after(ids, following)
        new_ids += bridge if fork_at == answer.path_length else ids + bridge
    return _Walk(
        first=answers[0],
        fork_at=fork_at,
        new_ids=new_ids,
        opened=next_opened,
        kept_text=history,
        added_text=added,
        has_stripped=has_stripped,
    )


def _up_to_next_answer(renderer: Renderer, written: Ended, *, is_last: bool) -> tuple[str, str]:
    """Return the text from an answer's end token through the next answer's header, and the rest; "" twice if none."""
    if is_last:
        return written.end + written.rest, ""
    header = renderer.answer_header
    before, found, rest = written.rest.partition(header) if header else ("", "", "")
    return (written.end + before + header, rest) if found else ("", "")


def _is_kept(renderer: Renderer, answer: Answer, written: Ended, opened: str) -> bool:
    """Return whether the template wrote the whole answer, thinking included, after what it had `opened` for it."""
    if not written.answer.startswith(opened):
        return False
    return not answer.has_thinking or renderer.probe(answer.number) in written.answer


def _ids_after_thinking(renderer: Renderer, answer: Answer, written: Ended) -> list[int]:
    """Return the tokens of an answer whose thinking the template left out, without an end token.

    They are the sampled tokens, verbatim, if one of them starts exactly where the white space after the thinking ends;
    otherwise their text is tokenised anew. They are preceded by what the template writes there.
    """
    block = answer.block.tolist()
    if block and block[-1] in renderer.stop_token_ids:
        block.pop()
    lead = renderer.thinking.lead(written.answer)
    ids = _after_last(block, renderer.thinking_end_ids)
    if ids is None:
        text = renderer.detokenizer.text_of(block)
        if renderer.thinking.end in text:
            text = text.rpartition(renderer.thinking.end)[2].lstrip()
        elif answer.has_thinking or answer.prompt.is_thinking:
            text = ""  # cut off while it was thinking
        return renderer.ids_of(lead + text)
    text = renderer.detokenizer.text_of(ids)
    for wanted, prefix in ((lead + text.lstrip(), ""), (text.lstrip(), lead)):
        start = _start_of(renderer, ids, wanted)
        if start is not None:
            return renderer.ids_of(prefix) + ids[start:]
    return renderer.ids_of(lead + text.lstrip())


def _after_last(ids: list[int], mark: list[int]) -> list[int] | None:
    """Return what follows the last occurrence of `mark` in `ids`, or None."""
    for end in range(len(ids), len(mark) - 1, -1):
        if ids[end - len(mark) : end] == mark:
            return ids[end:]
    return None


def _start_of(renderer: Renderer, ids: list[int], wanted: str) -> int | None:
    """Return where in `ids` the tokens of `wanted`, a suffix of their text, start; None if none starts there."""
    for start in range(len(ids) + 1):
        text = renderer.detokenizer.text_of(ids[start:])
        if text == wanted:
            return start
        if len(text) < len(wanted):
            break
    return None
