"""Reads an answer in order (reasoning, content, calls), whole or as it arrives, and decides what leaves when.

Reasoning and content leave as they arrive. Text that begins a call, or may begin one, is held back until the call is
complete, and the call leaves in one piece. A malformed call is counted and becomes content, so that the agent sees what
the model wrote: all of it once its arguments have begun, as they may quote other calls; else up to where it breaks.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace

from areal_agent.tokens.formats.base import AnswerDelta, Family, ParsedAnswer, PartialCall, ToolCall
from areal_agent.tokens.formats.cursor import SPACE, Cursor, MalformedCall, MoreNeeded
from areal_agent.tokens.formats.thinking import Thinking
from areal_agent.tokens.formats.values import ParameterTypes


class AnswerReader:
    """Reads one answer: `feed` it the text in any pieces, then `finish`; together they return all its deltas.

    `family`: None if nothing is a call. `thinking`: the tags of reasoning, if they have a meaning. `is_thinking`: the
    prompt has opened the reasoning. `only_tool`: a call of another tool is malformed; so is one that `accepts` refuses.
    `types`: those of the tools' parameters.
    """

    def __init__(
        self,
        *,
        family: Family | None,
        thinking: Thinking | None,
        is_thinking: bool = False,
        only_tool: str | None = None,
        accepts: Callable[[ToolCall], bool] | None = None,
        types: ParameterTypes | None = None,
    ) -> None:
        self._family = family
        self._thinking = thinking
        self._is_thinking = is_thinking
        self._only_tool = only_tool
        self._accepts = accepts
        self._types = types
        self._cursor = Cursor()
        self._reasoning: Prose | None = None
        self._content = Prose(keeps_edges=True)
        self._opening = ""  # of the next call
        self._num_tried = 0  # the number of characters of that call that were at hand when it was last read
        self._num_open = 0  # calls within a call whose text broke, and that one
        self._calls: list[ToolCall] = []
        self._num_malformed = 0
        self._deltas: list[AnswerDelta] = []
        self._step = self._begin()
        self._is_done = False

    @property
    def has_call(self) -> bool:
        """Return whether a call has been read."""
        return bool(self._calls)

    @property
    def has_block(self) -> bool:
        """Return whether a call has been read, and the end of its block if that comes next."""
        is_ending = self._family and self._family.marks.endings and self._step in (self._end_call, self._end_block)
        return bool(self._calls) and not is_ending

    def close(self) -> None:
        """Read no more: the answer ends here, whatever has been held back."""
        self._is_done = True

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        """Read more of the answer. Return what leaves with it."""
        self._cursor.append(text)
        with contextlib.suppress(MoreNeeded):
            while not self._is_done:
                self._step()
        deltas, self._deltas = tuple(self._deltas), []
        return deltas

    def begin_with(self, text: str) -> None:
        """Read the beginning of the answer that the prompt ended with. It belongs to the answer and does not leave."""
        self.feed(text)

    def go_on_after(self, content: str) -> None:
        """Read on after content that somebody else wrote: it holds no call, belongs to the answer, does not leave."""
        if self._is_thinking:
            self._reasoning = Prose(keeps_edges=False)
        self._content.take(content)
        self._step = self._read_content if content else self._begin_content

    def finish(self, text: str = "") -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        """Read the end of the answer. Return what leaves last, and the whole answer."""
        self._cursor.is_ended = True
        deltas = self.feed(text)
        return deltas, ParsedAnswer(
            content=self._content.text,
            reasoning=None if self._reasoning is None else self._reasoning.text,
            tool_calls=tuple(self._calls),
            num_malformed=self._num_malformed,
        )

    # ------------------------------------------------------- steps: each names the next one, or needs more text

    def _begin(self) -> Callable[[], None]:
        """Return the first step."""
        return self._begin_reasoning if self._thinking else self._begin_content

    def _begin_reasoning(self) -> None:
        if self._is_thinking or self._cursor.accept(self._tags.begin):
            self._reasoning = Prose(keeps_edges=False)
            self._step = self._read_reasoning
        else:
            self._step = self._begin_content

    def _read_reasoning(self) -> None:
        self._cursor.find((self._tags.end,), self._think)
        self._cursor.accept(self._tags.end)
        self._step = self._pass_space

    @property
    def _tags(self) -> Thinking:
        assert self._thinking
        return self._thinking

    def _pass_space(self) -> None:
        self._cursor.take(SPACE)
        self._step = self._begin_content

    def _begin_content(self) -> None:
        self._opening = self._cursor.peek(*self._family.marks.bare_openings) if self._family else ""
        self._step = self._read_call if self._opening else self._read_content

    def _read_content(self) -> None:
        self._opening = self._cursor.find(self._family.marks.openings if self._family else (), self._say)
        if self._opening:
            self._step = self._read_call
        else:
            self._end_answer()

    def _end_answer(self) -> None:
        if leaving := self._content.end():
            self._deltas.append(AnswerDelta(content=leaving))
        self._is_done = True

    def _read_call(self) -> None:
        assert self._family
        self._wait_for_call(self._family.marks.closing)
        begin, call, is_whole = self._cursor.position, PartialCall(self._only_tool, self._types), True
        try:
            self._cursor.expect(self._opening)
            self._family.read(self._cursor, call, self._opening)
        except MalformedCall:
            is_whole = False
        except MoreNeeded:
            self._num_tried = len(self._cursor.text) - begin
            self._cursor.position = begin
            raise
        self._num_tried = 0
        if is_whole and self._takes(call):
            self._step = self._end_call
            return
        if call.has_begun or self._opening not in self._family.marks.bare_openings:
            self._num_malformed += 1
        said = self._cursor.text[begin : self._cursor.position]
        self._say(said)
        self._step = self._read_content
        if call.has_begun and not is_whole:
            inner, closing = self._family.marks.nested
            self._num_open = max(1, 1 + said.count(inner, len(self._opening)) - said.count(closing)) if inner else 1
            self._step = self._read_broken

    def _read_broken(self) -> None:
        """Read the rest of a call whose text broke, through its closing. What looks like a call in it is not made."""
        assert self._family
        inner, closing = self._family.marks.nested
        tag = self._cursor.find((inner, closing) if inner else (), self._say)
        if not tag:
            self._end_answer()
            return
        self._say(self._cursor.accept(tag))
        self._num_open += 1 if tag == inner else -1
        if self._num_open == 0:
            self._step = self._read_content

    def _end_call(self) -> None:
        assert self._family
        marks = self._family.marks
        after = self._cursor.peek(*marks.separators, *marks.endings)
        if after in marks.separators:
            self._opening, self._step = after, self._read_call
        else:
            self._step = self._end_block

    def _end_block(self) -> None:
        assert self._family
        while self._cursor.accept(*self._family.marks.endings):
            pass
        self._step = self._read_content

    def _wait_for_call(self, closing: str) -> None:
        """Raise MoreNeeded unless the call may be complete or its text has doubled since it was last tried.

        So a long call is not read again with every token.
        """
        num_held = len(self._cursor.text) - self._cursor.position
        may_end = closing in self._cursor.text[self._cursor.position + max(0, self._num_tried - len(closing) + 1) :]
        if not (may_end or num_held >= 2 * self._num_tried or self._cursor.is_ended):
            raise MoreNeeded

    # ------------------------------------------------------------------------------------------- what leaves

    def _think(self, text: str) -> None:
        if self._reasoning and (leaving := self._reasoning.add(text)):
            self._deltas.append(AnswerDelta(reasoning=leaving))

    def _say(self, text: str) -> None:
        if leaving := self._content.add(text):
            self._deltas.append(AnswerDelta(content=leaving))

    def _takes(self, call: PartialCall) -> bool:
        """Take a call that has been read to its end, unless it is malformed. Return whether it was taken."""
        tool_call = call.whole()
        if tool_call is None or not (self._accepts is None or self._accepts(tool_call)):
            return False
        if any(tool_call.id == one.id for one in self._calls):
            tool_call = replace(tool_call, id=None)  # the agent needs ids that differ
        self._content.keeps_edges = False
        self._deltas.append(AnswerDelta(call=tool_call, call_index=len(self._calls)))
        self._calls.append(tool_call)
        return True


class Prose:
    """Text that leaves as it arrives. White space waits for what follows, as it may not belong to the text at an end.

    >>> prose = Prose(keeps_edges=False)
    >>> prose.add(" a "), prose.add("b "), prose.end()
    ('a', ' b', '')
    """

    def __init__(self, *, keeps_edges: bool) -> None:
        self.keeps_edges = keeps_edges
        self._space = ""
        self._said: list[str] = []

    @property
    def text(self) -> str:
        """All that has left."""
        return "".join(self._said)

    def add(self, text: str) -> str:
        """Add text that has arrived. Return what leaves with it."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not self._said and not self.keeps_edges:
            body = body.lstrip()
        return self._say(body)

    def take(self, text: str) -> None:
        """Add text that does not leave, white space included."""
        self._say(text)

    def end(self) -> str:
        """End the text. Return what leaves last."""
        return self._say(self._space if self.keeps_edges else "")

    def _say(self, text: str) -> str:
        if text:
            self._said.append(text)
        return text
