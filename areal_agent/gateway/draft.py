"""One answer while it is sampled: tokens come in, text goes out, until a stop text or its only call ends it.

A `Draft` decides where the answer ends and which token brought which text. A `StopFinder` finds stop texts in text that
comes in pieces; a `Reader` parses the text as a chat's (reasoning, tool calls) or as plain text; an `Outlet` carries
the pieces from the engine to the stream that writes them.
"""

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from areal_agent.tokens.formats.answer_format import AnswerFormat
from areal_agent.tokens.formats.base import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.formats.reader import AnswerReader
from areal_agent.tokens.renderer import Detokenizer
from areal_agent.types import FinishReason, GenerateResult, JsonObject, TokenChunk, TopLogprobs, record


class StopFinder:
    """Lets text through up to the first stop text, which ends it.

    The stop text that is completed first counts; of several completed together, the longest. So the result does not
    depend on how the text was cut into pieces. Only a possible beginning of a stop text is held back.

    >>> finder = StopFinder(["END"])
    >>> finder.feed("to the E"), finder.feed("ND of"), finder.stop_text
    ('to the ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stop_text = ""  # the one that was found

    def feed(self, text: str) -> str:
        """Take more text; return the text that may be sent."""
        if self.stop_text or not text:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stop_text = text[start:end]
            self._held = ""
            return text[:start]
        num_free = len(text) - self._num_open(text)
        self._held = text[num_free:]
        return text[:num_free]

    def finish(self) -> str:
        """Return the text held back, which turned out not to be a stop text."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """Return how many characters at the end of `text` may begin a stop text."""
        for num_open in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-num_open:]) for stop in self._stops):
                return num_open
        return 0


class Reader(Protocol):
    """Parses one answer, in pieces or whole. Implementations: `AnswerReader` and `PlainReader`."""

    @property
    def has_block(self) -> bool:
        """True once a tool call has been read, and the end of its block if that comes next."""
        ...

    def close(self) -> None:
        """End the answer here, whatever has been held back."""
        ...

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        """Read more of the answer; return what can be sent."""
        ...

    def finish(self, text: str = "") -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        """Read the end of the answer; return the last deltas and the whole parsed answer."""
        ...


class Reading(Protocol):
    """Makes the readers for the answers to one request."""

    @property
    def num_given(self) -> int:
        """The number of characters at the beginning of the content that the agent gave."""
        ...

    def reader(self) -> Reader:
        """Make a reader for one answer."""
        ...


@record
class ChatReading:
    """Reads a chat's answers.

    `opening` is the beginning of a forced call, with which the prompt ends. `given` is text that the agent wrote there:
    it is content, even if it looks like a call, and is not sent back to it.
    """

    answer_format: AnswerFormat
    may_call_tools: bool
    is_thinking: bool  # the prompt opened the reasoning
    opening: str = ""
    given: str | None = None
    only_tool: str | None = None  # a call of any other tool is malformed
    accepts: Callable[[ToolCall], bool] | None = None  # a call that it rejects is malformed
    tools: Sequence[JsonObject] = ()  # their schemas give arguments that are written as bare text a type

    @property
    def num_given(self) -> int:
        return len(self.given or "")

    def reader(self) -> AnswerReader:
        reader = self.answer_format.reader(
            may_call_tools=self.may_call_tools,
            is_thinking=self.is_thinking,
            only_tool=self.only_tool,
            accepts=self.accepts,
            tools=self.tools,
        )
        if self.given is not None:
            reader.go_on_after(self.given)
        elif self.opening:
            reader.begin_with(self.opening)
        return reader


class PlainReading:
    """Reads answers as plain text."""

    num_given = 0

    def reader(self) -> "PlainReader":
        return PlainReader()


class PlainReader:
    """Passes all text on as content."""

    has_block = False

    def __init__(self) -> None:
        self._texts: list[str] = []

    def close(self) -> None:
        """Nothing is held back."""

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        self._texts.append(text)
        return (AnswerDelta(content=text),) if text else ()

    def finish(self, text: str = "") -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        return self.feed(text), ParsedAnswer(content="".join(self._texts))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A token with its log-probability. `start` is the number of characters of the answer before its text."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The text and tokens that an answer gained since the gain before.

    `rows` are the tokens whose text has been sent. They lag behind `token_ids` while text is held back, and never
    include the end token or the tokens of a stop text.
    """

    deltas: tuple[AnswerDelta, ...]
    token_ids: tuple[int, ...]
    rows: tuple[TokenRow, ...]


class Draft:
    """An answer in the making. Once it `has_ended`, further tokens are not part of it.

    Special tokens and `stop_token_ids` may end the answer, so the text of one is held back until another token follows.
    With `is_single_call` the answer ends with its first tool call.
    """

    def __init__(
        self,
        *,
        detokenizer: Detokenizer,
        reader: Reader,
        stop_token_ids: Sequence[int],
        stops: Sequence[str] = (),
        is_single_call: bool = False,
    ) -> None:
        self.has_ended = False
        self.num_through_call = 0  # tokens up to the end of the last whole call, or of its block once that is known
        self._is_block_open = False
        self._stream = detokenizer.stream()
        self._reader = reader
        self._finder = StopFinder(stops)
        self._special_ids = detokenizer.special_ids
        self._stop_token_ids = stop_token_ids
        self._is_single_call = is_single_call
        self._rows: list[TokenRow] = []
        self._held_id: int | None = None  # the last token while it may be the end
        self._num_decoded = 0  # characters
        self._num_out = 0  # characters that the stop finder has let through
        self._texts: list[str] = []
        self._num_fed = 0  # tokens, including those after the end
        self._num_told = 0  # tokens in the gains so far
        self._num_rows_told = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """The text of the answer, as far as it may be sent."""
        return "".join(self._texts)

    @property
    def stop_text(self) -> str:
        """The stop text that ended the answer, or ""."""
        return self._finder.stop_text

    def feed(self, chunk: TokenChunk) -> tuple[AnswerDelta, ...]:
        """Take tokens; return the deltas that may be sent."""
        deltas: list[AnswerDelta] = []
        top_logprobs = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        for row in zip(chunk.token_ids, chunk.logprobs, top_logprobs, strict=True):
            deltas += () if self.has_ended else self._take(*row)
        self._num_fed += len(chunk.token_ids)
        return tuple(deltas)

    def finish(self, result: GenerateResult) -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        """Take the tokens that the engine did not stream, and release the text held back."""
        deltas = [*self.feed(_rest(result, self._num_fed))]
        if not self.has_ended:
            if result.finish_reason is not FinishReason.STOP:
                deltas += self._release()
            deltas += self._say(self._stream.finish())
        deltas += self._let_out(self._finder.finish())
        self._is_finished = True
        last_deltas, parsed = self._reader.finish()
        return (*deltas, *last_deltas), parsed

    def kept(self, result: GenerateResult) -> GenerateResult:
        """Cut the result to the answer. A result with fewer tokens than were streamed stays as it is."""
        is_whole = len(result.token_ids) >= len(self._rows)
        return cut(result, len(self._rows)) if self.has_ended and is_whole else result

    def gain(self, deltas: tuple[AnswerDelta, ...]) -> Gain:
        """Return these deltas and the tokens since the gain before."""
        first, last = self._num_rows_told, self._num_rows_out()
        first_id, self._num_told, self._num_rows_told = self._num_told, len(self._rows), last
        return Gain(
            deltas=deltas,
            token_ids=tuple(row.token_id for row in self._rows[first_id:]),
            rows=tuple(self._rows[first:last]),
        )

    def rows(self) -> tuple[TokenRow, ...]:
        """Return all tokens whose text has been let through."""
        return tuple(self._rows[: self._num_rows_out()])

    def _take(self, token_id: int, logprob: float, top_logprobs: TopLogprobs) -> list[AnswerDelta]:
        deltas = self._release()
        if self.has_ended:
            return deltas
        self._rows.append(
            TokenRow(token_id=token_id, logprob=logprob, top_logprobs=top_logprobs, start=self._num_decoded)
        )
        if token_id in self._special_ids or token_id in self._stop_token_ids:
            self._held_id = token_id
            return deltas
        return deltas + self._say(self._stream.feed(token_id))

    def _release(self) -> list[AnswerDelta]:
        """Say the held token's text: it was not the end."""
        if self._held_id is None:
            return []
        token_id, self._held_id = self._held_id, None
        return self._say(self._stream.feed(token_id))

    def _say(self, text: str) -> list[AnswerDelta]:
        self._num_decoded += len(text)
        deltas = self._let_out(self._finder.feed(text))
        self.has_ended = self.has_ended or bool(self._finder.stop_text)
        return deltas

    def _let_out(self, text: str) -> list[AnswerDelta]:
        if not text:
            return []
        self._num_out += len(text)
        self._texts.append(text)
        deltas = self._reader.feed(text)
        if any(delta.call is not None for delta in deltas):
            self.num_through_call, self._is_block_open = len(self._rows), not self._reader.has_block
        elif self._is_block_open and self._reader.has_block:  # the token before was the last of the block
            self.num_through_call, self._is_block_open = len(self._rows) - 1, False
        if self._is_single_call and self._reader.has_block:
            self.has_ended = True
            self._reader.close()
        return list(deltas)

    def _num_rows_out(self) -> int:
        """Count the leading tokens whose text has been let through completely."""
        num_rows = len(self._rows) - (self._held_id is not None)
        if self._is_finished and not self.has_ended:
            return num_rows
        num_begun = bisect_left(self._rows, self._num_out, hi=num_rows, key=_start)
        end = self._rows[num_begun].start if num_begun < len(self._rows) else self._num_decoded
        return num_begun if self.has_ended or end <= self._num_out else num_begun - 1


def cut(result: GenerateResult, num_tokens: int) -> GenerateResult:
    """Cut a result to its first tokens, with finish reason `stop`."""
    return replace(
        result,
        token_ids=result.token_ids[:num_tokens],
        logprobs=result.logprobs[:num_tokens],
        top_logprobs=result.top_logprobs[:num_tokens],
        versions=tuple(
            replace(span, end=min(span.end, num_tokens)) for span in result.versions if span.start < num_tokens
        ),
        finish_reason=FinishReason.STOP,
    )


def _rest(result: GenerateResult, num_tokens: int) -> TokenChunk:
    return TokenChunk(
        token_ids=result.token_ids[num_tokens:],
        logprobs=result.logprobs[num_tokens:],
        top_logprobs=result.top_logprobs[num_tokens:],
    )


def _start(row: TokenRow) -> int:
    return row.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The gain of one answer; `index` is its place among the answers to the request."""

    index: int
    gain: Gain


class Outlet:
    """Carries pieces to a stream: they are put in one by one and taken out in batches of all that came meanwhile.

    It is unbounded, but holds no more than the answers themselves; so `put` never waits.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._is_begun = False
        self._is_closed = False
        self._has_begun = asyncio.Event()  # also set by `close`
        self._has_news = asyncio.Event()

    def begin(self) -> None:
        """Note that tokens have come, even if no text may be sent yet."""
        self._is_begun = True
        self._has_begun.set()

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.begin()
        self._has_news.set()

    def close(self) -> None:
        """Note that nothing more will come."""
        self._is_closed = True
        self._has_begun.set()
        self._has_news.set()

    async def may_begin(self, patience_s: float) -> bool:
        """Wait for the first token, at most `patience_s`; return False if the outlet was closed without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._has_begun.wait()
        return self._is_begun or not self._is_closed

    async def take(self, until_s: float) -> list[Piece] | None:
        """Return all new pieces, or none once the event loop's clock says `until_s`; None once closed and empty."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._has_news.wait()
        pieces, self._pieces = self._pieces, []
        if not self._is_closed:
            self._has_news.clear()
        return pieces or (None if self._is_closed else [])
