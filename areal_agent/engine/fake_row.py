"""One request of the scripted engine: its reply, and how much of that has been sampled. Knows nothing of other rows."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk, TopLogprobs
from areal_agent.types import FinishReason, VersionSpan, WeightVersion


def fake_logprob(token_id: int, position: int) -> float:
    """The log-probability that FakeEngine reports for the token at this position of a completion.

    >>> fake_logprob(5, 0)
    -1.5
    """
    return -0.25 * (1 + (token_id + 7 * position) % 17)


def fake_top_logprobs(token_id: int, position: int, num_top_logprobs: int) -> TopLogprobs:
    """The likeliest tokens that FakeEngine reports there: the sampled one, then the smallest other ids.

    >>> fake_top_logprobs(5, 0, 3)
    ((5, -1.5), (0, -1.75), (1, -2.0))
    """
    best = fake_logprob(token_id, position)
    others = [id_ for id_ in range(num_top_logprobs) if id_ != token_id]
    return tuple((id_, best - 0.25 * rank) for rank, id_ in enumerate([token_id, *others][:num_top_logprobs]))


@dataclass(kw_only=True, slots=True, eq=False)
class FakeRow:
    """A request in flight. `answer` is its result; `on_chunk` gets what each call of `sample` adds."""

    request: GenerateRequest
    reply: tuple[int, ...]
    on_chunk: Callable[[TokenChunk], None] | None
    versions: list[WeightVersion] = field(default_factory=list[WeightVersion])  # one a sampled token
    is_held: bool = False  # it came during a pause that lets nobody begin
    answer: asyncio.Future[GenerateResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def sample(self, num_tokens: int, version: WeightVersion) -> int:
        """Up to `num_tokens` more tokens of the reply; how many there were."""
        if self.answer.done():
            return 0
        start = len(self.versions)
        limit = min(self.request.sampling.max_tokens, len(self.reply))
        reason: FinishReason | None = None
        while reason is None and len(self.versions) < min(limit, start + num_tokens):
            self.versions.append(version)
            if self.reply[len(self.versions) - 1] in self.request.sampling.stop_token_ids:
                reason = FinishReason.STOP
        if reason is None and len(self.versions) == limit:
            reason = FinishReason.STOP if limit == len(self.reply) else FinishReason.LENGTH
        self._hand_out(start)
        if reason is not None:
            self.finish(reason)
        return len(self.versions) - start

    def finish(self, reason: FinishReason) -> None:
        """Answer with what there is. Harmless when answered before."""
        if self.answer.done():
            return
        sampled = self._chunk(0)
        self.answer.set_result(
            GenerateResult(
                token_ids=sampled.token_ids,
                logprobs=sampled.logprobs,
                versions=_spans(self.versions),
                finish_reason=reason,
                top_logprobs=sampled.top_logprobs,
            )
        )

    def fail(self, error: Exception) -> None:
        """Answer with an error. Harmless when answered before."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def _hand_out(self, start: int) -> None:
        if self.on_chunk is not None and len(self.versions) > start:
            self.on_chunk(self._chunk(start))

    def _chunk(self, start: int) -> TokenChunk:
        """The sampled tokens from index `start` on."""
        sampled = list(enumerate(self.reply[: len(self.versions)]))[start:]
        num_top = self.request.num_top_logprobs
        return TokenChunk(
            token_ids=tuple(token_id for _, token_id in sampled),
            logprobs=tuple(fake_logprob(token_id, position) for position, token_id in sampled),
            top_logprobs=tuple(fake_top_logprobs(token_id, position, num_top) for position, token_id in sampled)
            if num_top
            else (),
            versions=_spans(self.versions[start:]),
        )


def _spans(versions: Sequence[WeightVersion]) -> tuple[VersionSpan, ...]:
    if not versions:
        return ()
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(version=versions[start], start=start, end=end) for start, end in zip(starts, ends, strict=True)
    )
