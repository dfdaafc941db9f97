"""One answer while it is sampled: tokens come in, text leaves, until a stop text or its one call ends it.

This decides where an answer ends, and which token brought which text.

Finds stop texts in text that comes in pieces. It knows no tokens.

How the text of an answer is read: as a chat's, with reasoning and tool calls, or as plain text.

What answers gain, on its way from the engine to the stream that writes it.
"""

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from areal_agent.tokens.formats.answer_format import AnswerFormat
from areal_agent.tokens.formats.base import AnswerDelta, ParsedAnswer, ToolCall
from areal_agent.tokens.formats.reader import AnswerReader
from areal_agent.tokens.renderer import Detokenizer
from areal_agent.types import FinishReason, GenerateResult, TokenChunk, TopLogprobs


class StopFinder:
    """Lets text through up to the first stop text, which ends it.

    The stop text that is complete first counts, of several that end together the longest: so what comes out does not
    depend on how the text was cut into pieces. Only a possible beginning of a stop text is held back.

    >>> finder = StopFinder(["END"])
    >>> finder.feed("to the E"), finder.feed("ND of"), finder.has_stopped
    ('to the ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """The text that may leave."""
        if self.has_stopped or not text:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            self._held = ""
            return text[: min(found)[1]]
        num_free = len(text) - self._num_open(text)
        self._held = text[num_free:]
        return text[:num_free]

    def finish(self) -> str:
        """What was held back: no stop text came of it."""
        held, self._held = self._held, ""
        return held

    def _num_open(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop text."""
        for num_open in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-num_open:]) for stop in self._stops):
                return num_open
        return 0


class Reader(Protocol):
    """Reads one answer, as it comes or whole. `AnswerReader` is one, `PlainReader` the other."""

    @property
    def has_call(self) -> bool:
        """Whether a tool call has been read."""
        ...

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        """Read more of the answer; returns what leaves with it."""
        ...

    def finish(self, text: str = "") -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        """Read the end of the answer; returns what leaves last, and all that the answer says."""
        ...


class Reading(Protocol):
    """How the answers of one request are read."""

    def reader(self) -> Reader:
        """Begin to read an answer."""
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

    def reader(self) -> AnswerReader:
        reader = self.answer_format.reader(
            may_call_tools=self.may_call_tools,
            is_thinking=self.is_thinking,
            only_tool=self.only_tool,
            accepts=self.accepts,
        )
        reader.feed(self.opening)  # nothing leaves: a call has begun
        return reader


class PlainReading:
    """Text is text."""

    def reader(self) -> "PlainReader":
        return PlainReader()


class PlainReader:
    """Lets all text through as content."""

    has_call = False

    def __init__(self) -> None:
        self._texts: list[str] = []

    def feed(self, text: str) -> tuple[AnswerDelta, ...]:
        self._texts.append(text)
        return (AnswerDelta(content=text),) if text else ()

    def finish(self, text: str = "") -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        return self.feed(text), ParsedAnswer(content="".join(self._texts))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A token as its log-probability is told. `start`: how many characters of the answer come before its text."""

    token_id: int
    logprob: float
    top_logprobs: TopLogprobs
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What an answer gained since it was last told: text that may leave, and tokens.

    `rows` are the tokens whose text has left: they lag behind `token_ids` where text is held back, and have neither
    the end token nor those of a stop text.
    """

    deltas: tuple[AnswerDelta, ...]
    token_ids: tuple[int, ...]
    rows: tuple[TokenRow, ...]


class Draft:
    """An answer in the making. Once it `has_ended`, further tokens are not part of it.

    Special tokens and `stop_token_ids` may end the answer: the text of one is held back until another token follows.
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
        self._stream = detokenizer.stream()
        self._reader = reader
        self._finder = StopFinder(stops)
        self._special_ids = detokenizer.special_ids
        self._stop_token_ids = stop_token_ids
        self._is_single_call = is_single_call
        self._rows: list[TokenRow] = []
        self._held_id: int | None = None  # the last token, as long as it may be the end
        self._num_decoded = 0  # characters
        self._num_out = 0  # characters that are past the stop texts
        self._texts: list[str] = []
        self._num_fed = 0  # tokens, those after the end included
        self._num_told = 0  # tokens in the gains so far
        self._num_rows_told = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """What the answer says, as far as it may leave."""
        return "".join(self._texts)

    def feed(self, chunk: TokenChunk) -> tuple[AnswerDelta, ...]:
        """Take tokens; returns what may leave."""
        deltas: list[AnswerDelta] = []
        top_logprobs = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        for row in zip(chunk.token_ids, chunk.logprobs, top_logprobs, strict=True):
            deltas += () if self.has_ended else self._take(*row)
        self._num_fed += len(chunk.token_ids)
        return tuple(deltas)

    def finish(self, result: GenerateResult) -> tuple[tuple[AnswerDelta, ...], ParsedAnswer]:
        """Take what the engine has not streamed, and let out what was held back."""
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
        """The result as far as it is part of the answer; one that an engine lost on the way stays what it is."""
        is_whole = len(result.token_ids) >= len(self._rows)
        return cut(result, len(self._rows)) if self.has_ended and is_whole else result

    def gain(self, deltas: tuple[AnswerDelta, ...]) -> Gain:
        """These deltas, and the tokens since the gain before."""
        first, last = self._num_rows_told, self._num_rows_out()
        first_id, self._num_told, self._num_rows_told = self._num_told, len(self._rows), last
        return Gain(
            deltas=deltas,
            token_ids=tuple(row.token_id for row in self._rows[first_id:]),
            rows=tuple(self._rows[first:last]),
        )

    def rows(self) -> tuple[TokenRow, ...]:
        """The tokens whose text is out, from the first."""
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
        """The held token was not the end."""
        if self._held_id is None:
            return []
        token_id, self._held_id = self._held_id, None
        return self._say(self._stream.feed(token_id))

    def _say(self, text: str) -> list[AnswerDelta]:
        self._num_decoded += len(text)
        deltas = self._let_out(self._finder.feed(text))
        self.has_ended = self.has_ended or self._finder.has_stopped
        return deltas

    def _let_out(self, text: str) -> list[AnswerDelta]:
        if not text:
            return []
        self._num_out += len(text)
        self._texts.append(text)
        deltas = self._reader.feed(text)
        if self._is_single_call and self._reader.has_call:
            self.has_ended = True
        return list(deltas)

    def _num_rows_out(self) -> int:
        """How many tokens have brought text that is out, up to the first that has not."""
        num_rows = len(self._rows) - (self._held_id is not None)
        if self._is_finished and not self.has_ended:
            return num_rows
        num_begun = bisect_left(self._rows, self._num_out, hi=num_rows, key=_start)
        end = self._rows[num_begun].start if num_begun < len(self._rows) else self._num_decoded
        return num_begun if self.has_ended or end <= self._num_out else num_begun - 1


def cut(result: GenerateResult, num_tokens: int) -> GenerateResult:
    """The first tokens of a result, ended by something in its text."""
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
    """What one answer gained; `index` is its place among the answers of the request."""

    index: int
    gain: Gain


class Outlet:
    """Put pieces in at any time; take them out in batches: what came while the last batch was written leaves at once.

    It holds no more than the answers themselves, so nobody has to wait to put something in.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._is_begun = False
        self._is_closed = False
        self._has_begun = asyncio.Event()  # or has been closed
        self._has_news = asyncio.Event()

    def begin(self) -> None:
        """Tokens have come, though perhaps none that may leave yet."""
        self._is_begun = True
        self._has_begun.set()

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self.begin()
        self._has_news.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._is_closed = True
        self._has_begun.set()
        self._has_news.set()

    async def has_begun(self) -> bool:
        """Wait for the first token; false when it was closed without one."""
        await self._has_begun.wait()
        return self._is_begun

    async def batches(self, silence_s: float) -> AsyncIterator[list[Piece]]:
        """All pieces, until it is closed and empty; an empty batch whenever none has come for `silence_s`."""
        while self._pieces or not self._is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence_s):
                    await self._has_news.wait()
            self._has_news.clear()
            pieces, self._pieces = self._pieces, []
            if pieces or not self._is_closed:
                yield pieces
