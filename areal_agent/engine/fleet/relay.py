"""One request on its way through a fleet, from one server to the next where that has to be.

    choose a server ──▶ sample there ──▶ the answer
         ▲                   │ it is gone, hangs, is taken out, ends by itself, or has weights of nobody's
         └── prompt and tokens so far

A server that says that the request is wrong is believed. Knows of servers and their weights what it sees in answers.
"""

import asyncio
import time
from collections.abc import Callable

from areal_agent.engine.fleet.call import Call
from areal_agent.engine.fleet.member import Member, MemberState
from areal_agent.engine.fleet.partial import Partial
from areal_agent.engine.fleet.patience import Patience
from areal_agent.engine.fleet.roster import Roster
from areal_agent.engine.fleet.versions import Versions
from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk
from areal_agent.errors import EngineError, EngineUnreachable
from areal_agent.types import FinishReason


class Relay:
    """One request. `run` once; `abort` at any time."""

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
        self._asked: tuple[Member, str, Call[GenerateResult]] | None = None  # where it is, and its id there

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
        """End it: `run` returns what there is, also when the server does not answer."""
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
        """Whatever the server says next is the end."""
        self._is_aborted = True
        self._roster.ring()

    async def _choose(self) -> Member | None:
        """A server; None when it was aborted meanwhile."""
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
            watch = take if self._is_watched else None
            return await member.ask(lambda engine: engine.generate(request, watch), call)
        finally:
            self._asked = None
            member.num_requests -= 1
            if member.state is MemberState.LEAVING:
                self._roster.ring()

    @property
    def _is_watched(self) -> bool:
        """Whether tokens are asked for as they come: costly, and of use to whoever sees them, or to another server."""
        return self._on_chunk is not None or self._streams_alone or len(self._roster.members) > 1

    async def _why_not(self, result: GenerateResult) -> str | None:
        """Why an answer is none, or not the end of one."""
        if result.finish_reason is FinishReason.ABORT and not self._is_aborted:
            return "it ended the request by itself, as when it shuts down"
        stranger = await self._versions.stranger((*self._partial.spans_before, *result.versions))
        return (
            None if stranger is None else f"it sampled with version {stranger.version}, which is not what serves here"
        )

    async def _move_on(self, member: Member, why: str) -> None:
        """Keep what another server can go on from. Raises EngineUnreachable when this was the end of it."""
        if member.state is MemberState.SERVING:
            self._roster.fall(member, why)
        self._failures.append(why if member.url in why else f"{member.url}: {why}")
        num_kept, why_not_more = self._partial.num_sure, self._partial.why_not_sure
        if self._is_aborted:
            num_kept = self._partial.num_told
        stranger = await self._versions.stranger(self._partial.spans)
        if stranger is not None and stranger.start < num_kept:
            num_kept, why_not_more = stranger.start, f"version {stranger.version} is not what serves here"
        if self._on_chunk is not None and num_kept < self._partial.num_tokens:
            raise EngineUnreachable(
                f"an answer of which {self._partial.num_tokens} tokens are out broke off, and they cannot be continued "
                f"at another server ({why_not_more}): {why}"
            )
        if len(self._failures) >= self._patience.max_failures and not self._is_aborted:
            raise EngineUnreachable(f"it failed {len(self._failures)} times: {'; then '.join(self._failures)}")
        self._partial.cut(num_kept)
        self._roster.num_moves += 1
