"""One request on its way through a fleet, from one server to the next where that has to be.

    choose a server ──▶ sample there ──▶ the answer
         ▲                   │ it is gone, hangs, is taken out, or ends by itself
         └── prompt and tokens so far

A server that says that the request is wrong is believed. Knows nothing of weights, and of servers what it sees.
"""

import asyncio
import time
from collections.abc import Callable

from areal_agent.engine.fleet.call import Call
from areal_agent.engine.fleet.member import Member, MemberState
from areal_agent.engine.fleet.partial import Partial
from areal_agent.engine.fleet.patience import Patience
from areal_agent.engine.fleet.roster import Roster
from areal_agent.errors import EngineError, EngineUnreachable
from areal_agent.types import FinishReason, GenerateRequest, GenerateResult, TokenChunk


class Relay:
    """One request. `run` once; `abort` at any time."""

    def __init__(
        self,
        request: GenerateRequest,
        on_chunk: Callable[[TokenChunk], None] | None,
        roster: Roster,
        patience: Patience,
    ) -> None:
        self._request_id = request.request_id
        self._on_chunk = on_chunk
        self._roster = roster
        self._patience = patience
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
            except EngineUnreachable as error:
                self._move_on(member, str(error))
            else:
                if result.finish_reason is not FinishReason.ABORT or self._is_aborted:
                    return self._partial.whole(result)
                self._partial.replace_by(result)
                self._move_on(member, "it ended the request by itself, as when it shuts down")

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
            return await member.ask(lambda engine: engine.generate(request, take), call)
        finally:
            self._asked = None
            member.num_requests -= 1
            if member.state is MemberState.LEAVING:
                self._roster.ring()

    def _move_on(self, member: Member, why: str) -> None:
        """Keep what another server can go on from. Raises EngineUnreachable when this was the end of it."""
        if member.state is MemberState.SERVING:
            self._roster.fall(member, why)
        self._failures.append(why if member.url in why else f"{member.url}: {why}")
        num_kept = self._partial.num_told if self._is_aborted else self._partial.num_sure
        if self._on_chunk is not None and num_kept < self._partial.num_tokens:
            raise EngineUnreachable(
                f"an answer of which {self._partial.num_tokens} tokens are out broke off, and they cannot be continued "
                f"at another server ({self._partial.why_not_sure}): {why}"
            )
        if len(self._failures) >= self._patience.max_failures and not self._is_aborted:
            raise EngineUnreachable(f"it failed {len(self._failures)} times: {'; then '.join(self._failures)}")
        self._partial.cut(num_kept)
        self._roster.num_moves += 1
