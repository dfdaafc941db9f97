"""One request on its way through a fleet, from one server to the next if necessary.

    choose a server ──▶ sample there ──▶ the answer
         ▲                   │ the server is gone, hangs, is taken out, ends the request, or has unknown weights
         └── prompt and tokens so far

The next server continues from the prompt and the tokens so far, with as many tokens as are left. If that would change
the answer, it starts over instead: with a penalty on generated tokens, or a grammar, one server has to generate all.
A server's verdict that a request is invalid is final.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from areal_agent.engine.fleet.member import Call, Member, MemberState, Patience, Roster, Versions
from areal_agent.errors import EngineError, EngineUnreachable
from areal_agent.types import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
)


class Partial:
    """The tokens of a request so far, in the order sampled, each with its weight version if that is known."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._spans: list[VersionSpan] = []  # without gaps; neighbours have different versions
        self._num_before = 0  # tokens of earlier servers
        self._num_servers = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def begin(self) -> GenerateRequest:
        """Return the request for the next server. It gets a new id, as an earlier server may still have the old one."""
        self._num_before = len(self._token_ids)
        self._num_servers += 1
        if self._num_servers == 1:
            return self._request
        sampling, name = self._request.sampling, f"{self._request.request_id}/{self._num_servers}"
        num_left = sampling.max_tokens - self._num_before
        num_due = max(0, sampling.min_tokens - self._num_before)
        return replace(
            self._request,
            request_id=blake2b(name.encode(), digest_size=16).hexdigest(),
            input_ids=self.all_ids(),
            sampling=replace(sampling, max_tokens=num_left, min_tokens=num_due),
        )

    def all_ids(self) -> Sequence[int]:
        """Return prompt and tokens so far."""
        if not self._token_ids:
            return self._request.input_ids
        return array("i", self._request.input_ids) + array("i", self._token_ids)

    def take(self, chunk: TokenChunk) -> None:
        """Add tokens that have arrived."""
        if self.num_told == len(self._token_ids):
            for span in chunk.versions:
                self._extend(span)
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._top_logprobs += chunk.top_logprobs

    def replace_by(self, result: GenerateResult) -> None:
        """Replace this server's tokens by its final result, which is authoritative."""
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
        """The version spans of the tokens whose version is known."""
        return tuple(self._spans)

    @property
    def spans_before(self) -> Sequence[VersionSpan]:
        """The version spans of the tokens of earlier servers."""
        return tuple(span for span in self._spans if span.start < self._num_before)

    @property
    def num_told(self) -> int:
        """The number of tokens with a known version, which are the first ones."""
        return self._spans[-1].end if self._spans else 0

    @property
    def num_sure(self) -> int:
        """The number of tokens that remain valid whatever the server does now."""
        is_whole = self.ending is not None and self.num_told == self.num_tokens
        return 0 if _looks_back(self._request.sampling) and not is_whole else self.num_told

    @property
    def why_not_sure(self) -> str:
        if self.num_told < self.num_tokens:
            return "the weights that sampled them are unknown"
        return "penalties and grammars count from the first token"

    @property
    def ending(self) -> FinishReason | None:
        """The finish reason if nothing is left to sample although the server did not say so; else None."""
        sampling = self._request.sampling
        if self._token_ids and self._token_ids[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._token_ids) >= sampling.max_tokens else None

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens but the first `num_tokens`."""
        del self._token_ids[num_tokens:], self._logprobs[num_tokens:], self._top_logprobs[num_tokens:]
        self._spans = [replace(span, end=min(span.end, num_tokens)) for span in self._spans if span.start < num_tokens]

    def whole(self, result: GenerateResult) -> GenerateResult:
        """Return the whole answer, which ends with the result of the last server."""
        if not self._num_before:
            return result
        self.replace_by(result)
        return self.result(result.finish_reason, result.cached_tokens)

    def result(self, reason: FinishReason, num_cached: int = 0) -> GenerateResult:
        """Return all tokens as a result."""
        return GenerateResult(
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(self._spans),
            finish_reason=reason,
            cached_tokens=min(num_cached, len(self._request.input_ids)),
            top_logprobs=tuple(self._top_logprobs),
        )

    def _extend(self, span: VersionSpan) -> None:
        """Append the tokens of a span, whichever server sampled them."""
        start, end = self.num_told, self.num_told + span.end - span.start
        if self._spans and self._spans[-1].version == span.version:
            start = self._spans.pop().start
        if end > start:
            self._spans.append(VersionSpan(version=span.version, start=start, end=end))


def _looks_back(sampling: SamplingParams) -> bool:
    """Return whether a token depends on which earlier tokens were generated, not only on the text."""
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.grammar)


class Relay:
    """One request. `run` it once; `abort` it at any time."""

    def __init__(
        self,
        request: GenerateRequest,
        on_chunk: Callable[[TokenChunk], None] | None,
        roster: Roster,
        versions: Versions,
        patience: Patience,
        streams_alone: bool,
    ) -> None:
        self._request_id = request.request_id
        self._on_chunk = on_chunk
        self._roster = roster
        self._versions = versions
        self._patience = patience
        self._streams_alone = streams_alone
        self._partial = Partial(request)
        self._is_aborted = False
        self._failures: list[str] = []
        # The server that has it, its id there, and the call.
        self._asked: tuple[Member, str, Call[GenerateResult]] | None = None

    async def run(self) -> GenerateResult:
        """Sample to the end. Raises EngineRejected, and EngineUnreachable when it has failed too often."""
        while True:
            if self._is_aborted:
                return self._partial.result(FinishReason.ABORT)
            if (ending := self._partial.ending) is not None:
                return self._partial.result(ending)
            member = await self._choose()
            if member is None:
                continue
            try:
                result = await self._sample(member)
                why = await self._why_not(result)
                if why is None:
                    return self._partial.whole(result)
                self._partial.replace_by(result)
            except EngineUnreachable as error:
                why = str(error)
            await self._move_on(member, why)

    async def abort(self) -> None:
        """End the request: `run` returns the tokens so far, even if the server does not answer."""
        self.abort_soon()
        if self._asked is None:
            return
        member, request_id, call = self._asked
        try:
            async with asyncio.timeout(self._patience.abort_s):
                await member.engine.abort(request_id)
        except (EngineError, TimeoutError):
            call.take_away(f"{member.url} did not answer an abort")

    def abort_soon(self) -> None:
        """Treat whatever the server returns next as the end."""
        self._is_aborted = True
        self._roster.ring()

    async def _choose(self) -> Member | None:
        """Return a server; None when the request was aborted meanwhile."""
        try:
            await self._roster.wait_for_some(self._patience.wait_s, lambda: self._is_aborted)
        except EngineUnreachable as error:
            raise EngineUnreachable("; before that ".join((str(error), *self._failures))) from None
        return None if self._is_aborted else self._roster.choose(self._partial.all_ids())

    async def _sample(self, member: Member) -> GenerateResult:
        request, call = self._partial.begin(), Call[GenerateResult]()

        def take(chunk: TokenChunk) -> None:
            member.heard_s = time.monotonic()
            self._partial.take(chunk)
            if self._on_chunk is not None:
                self._on_chunk(chunk)

        self._asked = (member, request.request_id, call)
        member.num_requests += 1
        try:
            # Streaming is costly, but a watching caller or another server needs the tokens.
            is_watched = self._on_chunk is not None or self._streams_alone or len(self._roster.members) > 1
            watch = take if is_watched else None
            return await member.ask(lambda engine: engine.generate(request, watch), call)
        finally:
            self._asked = None
            member.num_requests -= 1
            if member.state is MemberState.LEAVING:
                self._roster.ring()

    async def _why_not(self, result: GenerateResult) -> str | None:
        """Return why a result is not the end of the answer; None if it is."""
        if result.finish_reason is FinishReason.ABORT and not self._is_aborted:
            return "it ended the request by itself, as when it shuts down"
        stranger = await self._versions.stranger((*self._partial.spans_before, *result.versions))
        if stranger is None:
            return None
        return f"it sampled with version {stranger.version}, which is not the version served here"

    async def _move_on(self, member: Member, why: str) -> None:
        """Keep the tokens that another server can continue from. Raises EngineUnreachable if none can."""
        if member.state is MemberState.SERVING:
            self._roster.fall(member, why)
        self._failures.append(why if member.url in why else f"{member.url}: {why}")
        num_kept, why_not_more = self._partial.num_sure, self._partial.why_not_sure
        if self._is_aborted:
            num_kept = self._partial.num_told
        stranger = await self._versions.stranger(self._partial.spans)
        if stranger is not None and stranger.start < num_kept:
            num_kept, why_not_more = stranger.start, f"version {stranger.version} is not the version served here"
        if self._on_chunk is not None and num_kept < self._partial.num_tokens:
            raise EngineUnreachable(
                f"an answer broke off after {self._partial.num_tokens} tokens were handed out, and it cannot be "
                f"continued at another server ({why_not_more}): {why}"
            )
        if len(self._failures) >= self._patience.max_failures and not self._is_aborted:
            raise EngineUnreachable(f"the request failed {len(self._failures)} times: {'; then '.join(self._failures)}")
        self._partial.cut(num_kept)
        self._roster.num_moves += 1
