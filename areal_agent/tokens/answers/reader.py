"""Reads an answer off the tape in its order: reasoning, content, calls. Owns what leaves when, and what is malformed.

A call is malformed when its text is not of the form. As long as nothing of it has left it stays in the content, so that
the agent sees what the model wrote. Once its beginning has left it remains a call, with the text of its arguments up to
where it broke, which is never JSON. Either is counted.
"""

from collections.abc import Callable

from areal_agent.tokens.answers.call import OpenCall
from areal_agent.tokens.answers.dialect import Dialect, Marks
from areal_agent.tokens.answers.parsed import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.answers.prose import Prose
from areal_agent.tokens.answers.tape import SPACE, MalformedCall, Steps, Tape

THINK_BEGIN, THINK_END = "<think>", "</think>"


class AnswerReader:
    """One answer. `feed` it the text in any pieces, then `finish`; the deltas of both together are what it says.

    `has_thinking`: whether tags of reasoning have their meaning. `are_calls_whole`: a call leaves when it is complete,
    and a malformed one is always content. `dialect` None: nothing is a call. `only_tool`: a call of another tool is
    malformed. `accepts` judges whole calls: one that it refuses is malformed.
    """

    def __init__(
        self,
        *,
        dialect: Dialect | None,
        has_thinking: bool,
        is_thinking: bool,
        are_calls_whole: bool,
        only_tool: str | None,
        accepts: Callable[[ToolCall], bool],
    ) -> None:
        self._dialect = dialect
        self._has_thinking = has_thinking
        self._is_thinking = is_thinking
        self._are_calls_whole = are_calls_whole
        self._only_tool = only_tool
        self._accepts = accepts
        self._tape = Tape()
        self._reasoning: Prose | None = None
        self._content = Prose(keeps_edges=True)
        self._call: OpenCall | None = None
        self._calls: list[ToolCall] = []
        self._num_malformed = 0
        self._deltas: list[AnswerDelta] = []
        self._steps = self._read()

    @property
    def num_calls(self) -> int:
        """How many calls have been read, to their end or to where they broke."""
        return len(self._calls)

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        """More of the answer; returns what leaves with it."""
        self._tape.append(text)
        return self._advance()

    def finish(self, text: str = "") -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        """The answer has ended, with this text; returns what leaves last, and all that it says."""
        self._tape.append(text)
        self._tape.end()
        deltas = self._advance()
        return deltas, ParsedAnswer(
            content=self._content.text,
            reasoning=None if self._reasoning is None else self._reasoning.text,
            tool_calls=tuple(self._calls),
            num_malformed=self._num_malformed,
        )

    def _advance(self) -> tuple[AnswerDelta, ...]:
        next(self._steps, None)
        if self._call:
            self._call.flush()
        deltas = tuple(self._deltas)
        self._deltas.clear()
        return deltas

    def _read(self) -> Steps[None]:
        if self._has_thinking:
            yield from self._read_reasoning()
        if self._dialect is None:
            yield from self._tape.text_until((), self._say)
        else:
            yield from self._read_content(self._dialect)
        if leaving := self._content.end():
            self._emit(AnswerDelta(content=leaving))

    def _read_reasoning(self) -> Steps[None]:
        if not self._is_thinking and not (yield from self._tape.accept(THINK_BEGIN)):
            return
        self._reasoning = Prose(keeps_edges=False)
        yield from self._tape.text_until((THINK_END,), self._think)
        yield from self._tape.run(SPACE)
        self._tape.forget()

    def _read_content(self, dialect: Dialect) -> Steps[None]:
        marks = dialect.marks
        opening = yield from self._tape.accept(*marks.bare_openings)
        while opening := opening or (yield from self._tape.text_until(marks.openings, self._say)):
            opening = yield from self._read_call(dialect, opening)

    def _read_call(self, dialect: Dialect, opening: str) -> Steps[str]:
        """Take a call whose opening has been taken; returns the opening of the next if that was taken too, else ""."""
        marks = dialect.marks
        call = self._call = OpenCall(
            self._tape,
            index=len(self._calls),
            only_tool=self._only_tool,
            is_streamed=not self._are_calls_whole,
            emit=self._emit,
        )
        found = ""
        try:
            yield from dialect.read_call(self._tape, call, opening)
            is_complete = True
        except MalformedCall:
            is_complete = False
            if call.has_left:
                found = yield from self._read_rest(marks, call)
        is_taken = self._end_call(call, is_complete=is_complete, is_marked=opening not in marks.bare_openings)
        if found in marks.openings or not is_taken:
            return found
        after = yield from self._tape.accept(*marks.separators, *marks.endings)
        return after if after in marks.separators else ""

    def _read_rest(self, marks: Marks, call: OpenCall) -> Steps[str]:
        """Of a call that broke off after it had begun to leave; returns the tag that ends it."""
        call.flush()
        say = call.add_arguments if call.are_arguments_open else self._say
        return (yield from self._tape.text_until((*marks.closings, *marks.openings), say))

    def _end_call(self, call: OpenCall, *, is_complete: bool, is_marked: bool) -> bool:
        """Take the call, or its text as content; returns whether it was taken."""
        tool_call = call.end(is_complete=is_complete)
        is_good = tool_call is not None and not tool_call.is_broken and self._accepts(tool_call)
        if not is_good and (is_marked or call.has_begun):
            self._num_malformed += 1
        is_taken = False
        if tool_call and (is_good or call.has_left):
            call.leave()
            self._calls.append(tool_call)
            is_taken = True
        else:
            self._say("".join(self._tape.taken))
        self._call = None
        self._tape.forget()
        return is_taken

    def _think(self, text: str) -> None:
        if self._reasoning and (leaving := self._reasoning.add(text)):
            self._emit(AnswerDelta(reasoning=leaving))

    def _say(self, text: str) -> None:
        if leaving := self._content.add(text):
            self._emit(AnswerDelta(content=leaving))

    def _emit(self, delta: AnswerDelta) -> None:
        if delta.call_index is not None:
            self._content.keeps_edges = False
        self._deltas.append(delta)
