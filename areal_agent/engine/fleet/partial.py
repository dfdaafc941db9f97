"""What a request has got so far, from one server after the other: how it goes on, and what it is in the end.

It goes on as prompt and tokens so far, with as many tokens as are left. An answer of which that would be another one is
begun again instead: under a penalty for what was generated, or a grammar, the server has to have generated it itself.
It knows no server.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk, TopLogprobs
from areal_agent.types import FinishReason, SamplingParams, VersionSpan


class Partial:
    """Tokens in the order in which they were sampled, each with the version that sampled it, where that was told."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._spans: list[VersionSpan] = []  # without gap; neighbours are of different versions
        self._num_before = 0  # tokens of the servers before this one
        self._num_servers = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def begin(self) -> GenerateRequest:
        """What the next server is asked. Its id is its own: an earlier server may not have noticed yet."""
        self._num_before = len(self._token_ids)
        self._num_servers += 1
        if self._num_servers == 1:
            return self._request
        sampling, name = self._request.sampling, f"{self._request.request_id}/{self._num_servers}"
        return replace(
            self._request,
            request_id=blake2b(name.encode(), digest_size=16).hexdigest(),
            input_ids=self.all_ids(),
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self._token_ids)),
        )

    def all_ids(self) -> Sequence[int]:
        """Prompt and tokens so far."""
        if not self._token_ids:
            return self._request.input_ids
        return array("i", self._request.input_ids) + array("i", self._token_ids)

    def take(self, chunk: TokenChunk) -> None:
        """Tokens have come."""
        if self.num_told == len(self._token_ids):
            for span in chunk.versions:
                self._extend(span)
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs

    def replace_by(self, result: GenerateResult) -> None:
        """The server has said all at its end: that is what holds of its tokens."""
        self.cut(self._num_before)
        self.take(
            TokenChunk(
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                top_logprobs=result.top_logprobs,
                versions=result.versions,
            )
        )

    @property
    def spans(self) -> Sequence[VersionSpan]:
        """Of the tokens whose version was told."""
        return tuple(self._spans)

    @property
    def spans_before(self) -> Sequence[VersionSpan]:
        """Of the tokens of the servers before this one."""
        return tuple(span for span in self._spans if span.start < self._num_before)

    @property
    def num_told(self) -> int:
        """How many of the tokens have a known version: the first ones."""
        return self._spans[-1].end if self._spans else 0

    @property
    def num_sure(self) -> int:
        """How many of the tokens stand, whatever their server does now."""
        is_whole = self.ending is not None and self.num_told == self.num_tokens
        return 0 if _looks_back(self._request.sampling) and not is_whole else self.num_told

    @property
    def why_not_sure(self) -> str:
        if self.num_told < self.num_tokens:
            return "nobody said which weights sampled them"
        return "penalties and grammars count from the first token"

    @property
    def ending(self) -> FinishReason | None:
        """Why there is nothing left to sample, although its server never said so."""
        sampling = self._request.sampling
        if self._token_ids and self._token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._token_ids) >= sampling.max_tokens else None

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens but the first ones."""
        del self._token_ids[num_tokens:], self._logprobs[num_tokens:], self._top_logprobs[num_tokens:]
        self._spans = [replace(span, end=min(span.end, num_tokens)) for span in self._spans if span.start < num_tokens]

    def whole(self, result: GenerateResult) -> GenerateResult:
        """The answer that ends with what a server gave."""
        if not self._num_before:
            return result
        self.replace_by(result)
        return self.result(result.finish_reason, result.cached_tokens)

    def result(self, reason: FinishReason, num_cached: int = 0) -> GenerateResult:
        """All of it."""
        return GenerateResult(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._spans),
            finish_reason=reason,
            cached_tokens=min(num_cached, len(self._request.input_ids)),
            top_logprobs=tuple(self._top_logprobs),
        )

    def _extend(self, span: VersionSpan) -> None:
        """So many tokens more of that version, whichever server sampled them."""
        start, end = self.num_told, self.num_told + span.end - span.start
        if self._spans and self._spans[-1].version == span.version:
            start = self._spans.pop().start
        if end > start:
            self._spans.append(VersionSpan(version=span.version, start=start, end=end))


def _looks_back(sampling: SamplingParams) -> bool:
    """Whether a token depends on which of those before it were generated, and not on the text alone."""
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.grammar)
