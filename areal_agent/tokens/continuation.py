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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from areal_agent.errors import RequestError
from areal_agent.tokens.arrangement import CallIds, shapes_of
from areal_agent.tokens.prompt import Answer, Prompt, Shape, StandIn
from areal_agent.tokens.renderer import Ended, Renderer
from areal_agent.tokens.shield import Shielded
from areal_agent.types import ForkReason, JsonObject, record

Normalise = Callable[[JsonObject, int], JsonObject]
"""Maps a raw message and its index among the messages to the normalised message. Raises RequestError."""


@record
class Extension:
    """The tokens that a turn adds to a path, and the thinking that the template opens after them."""

    fork_at: int
    new_ids: list[int]
    opened: str
    stand_in: StandIn
    slices: tuple[tuple[int, int], ...] = ()
    fork_reason: ForkReason | None = None


@dataclass(kw_only=True, slots=True)
class _Walk:
    """Consecutive answers, as the template writes them from the first one's place on."""

    fork_at: int  # the number of tokens of the last answer's path that are kept
    opened: str  # the thinking that the template opens for the next answer
    new_ids: list[int] = field(default_factory=list[int])  # the tokens after them, up to the place of the next answer
    slices: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # those of them that were sampled
    has_stripped: bool = False

    def add_sampled(self, token_ids: Sequence[int]) -> None:
        self.slices.append((len(self.new_ids), len(self.new_ids) + len(token_ids)))
        self.new_ids += token_ids


class Continuation:
    """Extends paths of one session under one set of tools and template options."""

    def __init__(self, renderer: Renderer, tools: Sequence[JsonObject], options: JsonObject) -> None:
        self.tools = tools
        """The definitions as the agent sent them."""
        self._renderer = renderer
        self._tool_forms = renderer.tool_forms(tools)
        self._options = options

    def root(self, messages: Sequence[JsonObject], sampled: Collection[int] = ()) -> Extension:
        """Start a new path with normalised messages; `sampled` are the places of the session's own answers.

        Raises RequestError when the template refuses the messages, or leaves out a part of one.
        """
        forms = self._new_forms(messages, CallIds(self._renderer.arrangement), sampled)
        shapes = tuple(shapes_of(forms, sampled))
        self._require_complete(forms, shapes, num_new=len(forms), num_messages=len(forms))
        stand_in = self._whole(forms, shapes)
        history, opened = self._renderer.split_opened(stand_in.text)
        return Extension(fork_at=0, new_ids=self._renderer.ids_of(history), opened=opened, stand_in=stand_in)

    def extend(
        self,
        parent: Answer,
        echo: JsonObject,
        new: Sequence[JsonObject],
        normalise: Normalise,
        sampled: Collection[int] = (),
    ) -> Extension | None:
        """Continue `parent`, which came back as `echo`. Return None if the template rewrites its path.

        `sampled` are the places of other answers of the session's among the `new` messages.
        Raises RequestError when the template refuses the conversation.
        """
        if new and new[0]["role"] == "assistant" and self._renderer.joins_answers:
            return None  # where the sampled answer ends cannot be told
        ids = CallIds(self._renderer.arrangement)
        added = [self._answer_form(parent, echo, ids), *self._new_forms(new, ids, sampled)]
        num_messages = parent.prompt.num_messages + len(added)
        short = self._short(parent.prompt.stand_in)
        if short is not None:
            extension = self._extend(parent, short, added, num_messages, sampled)
            if extension is not None or short.is_whole:
                return extension
        forms = self._forms(parent.prompt, normalise)
        whole = self._whole(forms, tuple(shapes_of(forms)), may_cut=short is None)
        return self._extend(parent, whole, added, num_messages, sampled)

    def difference(self, prompt: Prompt, normalise: Normalise) -> str | None:
        """Render a prompt's whole conversation. Say how its ids differ from that, sampled answers aside, or None."""
        renderer, path = self._renderer, prompt.path()[: prompt.block_at]
        try:
            text = self._render(self._forms(prompt, normalise))
        except RequestError as error:
            return f"a prompt was made of which the whole conversation is refused ({error})"
        rest, place = renderer.split_opened(text)[0], 0
        for start, end in (*prompt.sampled_spans(), (len(path), None)):
            injected = renderer.text_of_part(path[place:start])
            following = renderer.after(rest, injected)
            written = renderer.split_at_end(following) if following and end is not None else None
            if (following != "") if end is None else (written is None):
                return (
                    "a prompt is not what the chat template writes: after a sampled answer it has "
                    f"{injected[:200]!r}, and the template {rest[:200]!r}"
                )
            if written is not None and end is not None:
                has_end = end > start and renderer.id_of(written.end) == path[end - 1]
                rest, place = written.rest if has_end else written.end + written.rest, end
        return None

    # ---------------------------------------------------------------------------------------------- one turn

    def _extend(
        self,
        parent: Answer,
        before: StandIn,
        added: Sequence[JsonObject],
        num_messages: int,
        sampled: Collection[int],
    ) -> Extension | None:
        forms = [*before.messages, *added]
        shapes = (*before.shapes, *shapes_of(added, [place + 1 for place in sampled]))
        try:
            self._require_complete(forms, shapes, num_new=len(added) - 1, num_messages=num_messages)
            text = self._render(forms)
        except RequestError:
            if before.is_whole:
                raise
            return None
        walk = _walk_answers(self._renderer, [parent], before.text, text)
        if walk is None:
            walk = self._walk_from_stripped(parent, before, added, text)
        if walk is None:
            return None
        return Extension(
            fork_at=walk.fork_at,
            new_ids=walk.new_ids,
            slices=tuple(walk.slices),
            opened=walk.opened,
            stand_in=before.grown(added, shapes, text),
            fork_reason=ForkReason.TEMPLATE_STRIPS_THINKING if walk.has_stripped else None,
        )

    def _walk_from_stripped(
        self, parent: Answer, before: StandIn, added: Sequence[JsonObject], text: str
    ) -> _Walk | None:
        """Go back to the first answer on the path whose thinking is no longer in the text."""
        first = next((one for one in _live_thinking(parent) if self._renderer.probe(one.number) not in text), None)
        if first is None:
            return None
        index = before.index_of(num_back=parent.prompt.num_messages - first.prompt.num_messages)
        if index is None:
            return None
        lineage = list(parent.lineage())
        answers = lineage[lineage.index(first) :: -1]
        if [form["role"] for form in (*before.messages[index:], *added)].count("assistant") != len(answers):
            return None  # the agent put answers of its own among them
        return _walk_answers(self._renderer, answers, self._render(before.messages[:index]), text)

    # --------------------------------------------------------------------------------------- forms and stand-ins

    def _render(self, forms: Sequence[JsonObject]) -> str:
        return self._renderer.write(forms, self._tool_forms, options=self._options)

    def _require_complete(
        self, forms: Sequence[JsonObject], shapes: Sequence[Shape], *, num_new: int, num_messages: int
    ) -> None:
        arrangement = self._renderer.arrangement
        has_tools = bool(self._tool_forms) and arrangement.has_definitions
        arrangement.require_complete(forms, shapes, num_new=num_new, num_messages=num_messages, has_tools=has_tools)

    def _whole(self, forms: Sequence[JsonObject], shapes: tuple[Shape, ...], *, may_cut: bool = True) -> StandIn:
        text = self._render(forms)
        return StandIn(messages=tuple(forms), shapes=shapes, text=text, num_tail=len(forms), may_cut=may_cut)

    def _short(self, stand_in: StandIn | None) -> StandIn | None:
        """Return a usable stand-in, cut if it has become long; None if there is none."""
        if stand_in is None or not self._renderer.may_elide:
            return stand_in if stand_in and stand_in.is_whole else None
        cut = stand_in.cut()
        if cut is None:
            return stand_in
        start, end = cut
        messages = stand_in.messages[:start] + stand_in.messages[end:]
        shapes = stand_in.shapes[:start] + stand_in.shapes[end:]
        try:
            text = self._render(messages)
        except RequestError:
            return replace(stand_in, may_cut=False)
        num_tail = min(stand_in.num_tail, len(messages) - start)
        return StandIn(messages=messages, shapes=shapes, text=text, num_tail=num_tail)

    def _forms(self, prompt: Prompt, normalise: Normalise) -> list[JsonObject]:
        """Return all messages of a prompt's conversation, with probes in the place of thinking."""
        forms: list[JsonObject] = []
        ids = CallIds(self._renderer.arrangement)
        for one in prompt.lineage():
            for message in one.delta:
                normalised = normalise(message, len(forms))
                if one.parent and message is one.delta[0]:
                    forms.append(self._answer_form(one.parent, normalised, ids))
                else:
                    forms.append(self._renderer.form(normalised, ids))
        return forms

    def _new_forms(self, messages: Sequence[JsonObject], ids: CallIds, sampled: Collection[int]) -> list[JsonObject]:
        forms = [self._renderer.form(message, ids) for message in messages]
        for place in sampled:
            forms[place] = _as_sampled(forms[place])
        return forms

    def _answer_form(self, answer: Answer, echo: JsonObject, ids: CallIds) -> JsonObject:
        """Return an echoed answer as the template receives it, with a probe in the place of its thinking.

        A template that drops the text beside calls is not given it: the sampled tokens have it.
        """
        renderer, has_text = self._renderer, True
        if echo.get("tool_calls"):
            echo, has_text = ids.inward(echo, answer.own_ids), not renderer.arrangement.has_text_apart
        echo = echo if has_text else {**echo, "content": ""}
        if answer.has_thinking and (has_text or not renderer.thinking.is_inline):
            return _as_sampled(renderer.form_with_thinking(echo, renderer.probe(answer.number)))
        return _as_sampled(renderer.form(echo))


def _as_sampled(form: JsonObject) -> JsonObject:
    """Return a sampled answer so that no template takes offence at control texts in it: it sees them broken up."""
    content = form["content"]
    return {**form, "content": "".join((content, ""))} if isinstance(content, Shielded) else form


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
    history, _ = renderer.split_opened(before)
    if not after.startswith(history):
        return None
    rest, next_opened = renderer.split_opened(after[len(history) :])
    walk = _Walk(fork_at=answers[0].prompt.block_at, opened=next_opened)
    for answer in answers:
        written = renderer.split_at_end(rest)
        if written is None:
            return None
        following, rest = _up_to_next_answer(renderer, written, is_last=answer is answers[-1])
        if not following:
            return None
        if not _is_kept(renderer, answer, written):
            walk.has_stripped = True
            lead, ids = _after_thinking(renderer, answer, written)
            walk.new_ids += lead
            walk.add_sampled(ids)
            ids = lead + ids
        elif answer is answers[0]:
            walk.fork_at, ids = answer.path_length, answer.sampled.tolist()
        else:
            ids = answer.block.tolist()
            walk.add_sampled(ids)
        walk.new_ids += renderer.ids_after(ids, following)
    return walk


def _up_to_next_answer(renderer: Renderer, written: Ended, *, is_last: bool) -> tuple[str, str]:
    """Return the text from an answer's end token through the next answer's header, and the rest; "" twice if none."""
    if is_last:
        return written.end + written.rest, ""
    header = renderer.answer_header
    before, found, rest = written.rest.partition(header) if header else ("", "", "")
    return (written.end + before + header, rest) if found else ("", "")


def _is_kept(renderer: Renderer, answer: Answer, written: Ended) -> bool:
    """Return whether the template wrote the whole answer, thinking included, after what it had opened for it."""
    prompt = answer.prompt
    if not written.answer.startswith(renderer.opened_before(prompt.opening, prompt.opened)):
        return False
    return not answer.has_thinking or renderer.probe(answer.number) in written.answer


def _after_thinking(renderer: Renderer, answer: Answer, written: Ended) -> tuple[list[int], list[int]]:
    """Return the tokens of an answer whose thinking the template left out, without an end token.

    First those that the template writes in the place of the thinking, then the sampled ones, verbatim, if one of them
    starts exactly where the white space after the thinking ends; otherwise their text is tokenised anew. If the
    template writes something else, all tokens are those of its text, and none is a sampled one.
    """
    block = answer.block.tolist()
    if block and block[-1] in renderer.stop_token_ids:
        block.pop()
    ids = _after(block, renderer.thinking_end_ids, is_last=renderer.thinking.is_inline)
    text = renderer.detokenizer.text_of(block if ids is None else ids)
    if ids is None and renderer.thinking.end in text:
        text = text.rpartition(renderer.thinking.end)[2]
    elif ids is None and (answer.has_thinking or answer.prompt.is_thinking):
        text = ""  # cut off while it was thinking
    text, lead = text.lstrip() if ids is None else text, renderer.thinking.lead(written.answer)
    if lead.isspace() and written.answer[len(lead) : len(lead) + 1] != text.lstrip()[:1]:
        lead = ""  # it belongs to the template's form of a call, which is another (Harmony's)
    if not _begins_as(renderer, written.answer[len(lead) :], text):
        return renderer.ids_of(written.answer), []
    for wanted, prefix in ((lead + text.lstrip(), ""), (text.lstrip(), lead)):
        start = None if ids is None else _start_of(renderer, ids, wanted)
        if ids is not None and start is not None:
            return renderer.ids_of(prefix), ids[start:]
    return renderer.ids_of(lead), renderer.ids_of(text.lstrip())


def _begins_as(renderer: Renderer, written: str, text: str) -> bool:
    """Return whether the template writes what was sampled after the thinking, as far as the agent sent it back."""
    ours, theirs = (
        renderer.answer_format.parse(one.replace("\r\n", "\n")) for one in (renderer.without_shields(written), text)
    )
    said, sampled = ours.content.strip(), theirs.content.strip()
    return ours.reasoning is None and (said.startswith(sampled) or sampled.startswith(said))


def _after(ids: list[int], mark: list[int], *, is_last: bool) -> list[int] | None:
    """Return what follows the last, or the first, occurrence of `mark` in `ids`; None if there is none."""
    ends = [end for end in range(len(mark), len(ids) + 1) if ids[end - len(mark) : end] == mark]
    return ids[ends[-1 if is_last else 0] :] if ends else None


def _start_of(renderer: Renderer, ids: list[int], wanted: str) -> int | None:
    """Return where in `ids` the tokens of `wanted`, a suffix of their text, start; None if none starts there."""
    for start in range(len(ids) + 1):
        text = renderer.detokenizer.text_of(ids[start:])
        if text == wanted:
            return start
        if len(text) < len(wanted):
            break
    return None
