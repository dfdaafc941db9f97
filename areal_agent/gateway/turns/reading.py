"""How the text of an answer is to be read: as a chat's, with reasoning and tool calls, or as plain text.

It knows no tokens: what is read is text, whole or as it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from areal_agent.tokens.answers.answer_format import AnswerFormat
from areal_agent.tokens.answers.parsed import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.answers.reader import AnswerReader


class Reader(Protocol):
    """Reads one answer as it comes."""

    @property
    def has_call(self) -> bool:
        """Whether a tool call has been read: a whole one, or in a stream one that broke after it had begun to leave."""
        ...

    def open(self) -> tuple[AnswerDelta, ...]:
        """What is said before any text has come."""
        ...

    def feed(self, text: str) -> tuple[AnswerDelta, ...]: ...

    def finish(self) -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]: ...


class Reading(Protocol):
    """How the answers of one request are read."""

    def parse(self, text: str) -> ParsedAnswer:
        """Read a whole answer."""
        ...

    def reader(self, *, is_streamed: bool) -> Reader:
        """Read an answer as it comes. What is not streamed leaves as it would from the whole answer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatReading:
    """An answer of a chat. `opening`: the beginning of a forced call, which stands in the prompt."""

    answer_format: AnswerFormat
    may_call_tools: bool
    is_thinking: bool  # the prompt has opened the reasoning
    opening: str = ""
    only_tool: str | None = None  # a call of another is malformed
    accepts: Callable[[ToolCall], bool] | None = None  # a call that it refuses is malformed

    def parse(self, text: str) -> ParsedAnswer:
        return self.answer_format.parse(
            self.opening + text,
            may_call_tools=self.may_call_tools,
            is_thinking=self.is_thinking,
            only_tool=self.only_tool,
            accepts=self.accepts,
        )

    def reader(self, *, is_streamed: bool) -> "ChatReader":
        reader = self.answer_format.reader(
            may_call_tools=self.may_call_tools,
            is_thinking=self.is_thinking,
            are_calls_whole=not is_streamed,
            only_tool=self.only_tool,
            accepts=self.accepts,
        )
        return ChatReader(reader, self.opening)


class ChatReader:
    """Reads an answer of a chat as it comes."""

    def __init__(self, reader: AnswerReader, opening: str) -> None:
        self._reader = reader
        self._opening = opening

    @property
    def has_call(self) -> bool:
        return self._reader.num_calls > 0

    def open(self) -> tuple[AnswerDelta, ...]:
        return self._reader.feed(self._opening) if self._opening else ()

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        return self._reader.feed(text)

    def finish(self) -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        return self._reader.finish()


class PlainReading:
    """Text is text."""

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(content=text)

    def reader(self, *, is_streamed: bool) -> "PlainReader":
        del is_streamed
        return PlainReader()


class PlainReader:
    """Lets all text through as content."""

    has_call = False

    def __init__(self) -> None:
        self._texts: list[str] = []

    def open(self) -> tuple[AnswerDelta, ...]:
        return ()

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        self._texts.append(text)
        return (AnswerDelta(content=text),)

    def finish(self) -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        return (), ParsedAnswer(content="".join(self._texts))
