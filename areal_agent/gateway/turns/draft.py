"""One answer while it is sampled: tokens come in, text leaves, until a stop text or its one call ends it.

Owns where an answer ends and which token brought which text. It knows no engine, no HTTP and no session.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_agent.engine_types import GenerateResult, TokenChunk, TopLogprobs
from areal_agent.gateway.turns.reading import Reader
from areal_agent.gateway.turns.stop import StopFinder
from areal_agent.tokens.answers.parsed import AnswerDelta, ParsedAnswer
from areal_agent.tokens.detokenizer import Detokenizer
from areal_agent.types import FinishReason


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
        self._is_open = False
        self._num_fed = 0  # tokens, those after the end included
        self._num_told = 0  # tokens in the gains so far
        self._num_rows_told = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """What the answer says, as far as it may leave."""
        return "".join(self._texts)

    def feed(self, chunk: TokenChunk) -> tuple[AnswerDelta, ...]:
        """Take tokens; tells what may leave. The beginning of a forced call leaves with the first of them."""
        deltas = [] if self._is_open else [*self._reader.open()]
        self._is_open = True
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
