"""The servers of a fleet and their states: the one place that changes them, and says so once.

    catching_up ──▶ serving ──▶ leaving ──▶ (gone)
         ▲             │
         └ quarantined ◀   it failed, hangs, or serves another version than is due

Who waits for a server is woken by every change. It asks no server anything.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from areal_agent.engine.fleet.member import Member, MemberState
from areal_agent.engine.fleet.routing import Router
from areal_agent.errors import EngineUnreachable
from areal_agent.types import WeightVersion

MAX_LAG = 2
"""How often in a row a server may be found behind others, where this fleet does not push, before it comes last."""

logger = logging.getLogger(__name__)


class Roster:
    """All members, by URL."""

    def __init__(self, members: Iterable[Member], router: Router | None = None) -> None:
        self._members = {member.url: member for member in members}
        self._router = router or Router()
        self._has_changed = asyncio.Event()
        self.num_quarantines = 0
        self.num_moves = 0  # of requests, from one server to the next

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    @property
    def serving(self) -> list[Member]:
        """Those that may be asked to sample."""
        return [member for member in self._members.values() if member.state is MemberState.SERVING]

    @property
    def newest_version(self) -> WeightVersion | None:
        """That any of them has been found with."""
        return max((member.version for member in self.serving if member.version is not None), default=None)

    def find(self, url: str) -> Member | None:
        return self._members.get(url)

    def enter(self, member: Member) -> None:
        """One more."""
        self._members[member.url] = member
        self.ring()

    def forget(self, member: Member) -> None:
        """It is gone; another one may be at its URL by now."""
        if self._members.get(member.url) is member:
            del self._members[member.url]
        self.ring()

    # ------------------------------------------------------------------------------------------------ states

    def fall(self, member: Member, why: str, *, is_lost: bool = False) -> None:
        """It gets no further requests. With `is_lost` those that it has are taken away from it, too."""
        if member.state is MemberState.SERVING:
            self.num_quarantines += 1
            left = len(self.serving) - 1
            logger.warning("%s is quarantined: %s; servers that serve now: %d", member.url, why, left)
        self._move(member, MemberState.QUARANTINED, why)
        member.looked_after.set()
        if is_lost:
            member.take_away_all(f"was quarantined: {why}")

    def catch_up(self, member: Member) -> None:
        """It answers, and is being verified."""
        self._move(member, MemberState.CATCHING_UP, member.reason)

    def serve(self, member: Member) -> None:
        """It gets requests from now on."""
        logger.info("%s serves version %s", member.url, member.version)
        self._move(member, MemberState.SERVING, "")

    def leave(self, member: Member) -> None:
        """It gets no further requests, and will be forgotten."""
        logger.info("%s leaves; requests that it still has: %d", member.url, member.num_requests)
        self._move(member, MemberState.LEAVING, "it is being removed")

    def _move(self, member: Member, state: MemberState, reason: str) -> None:
        if member.state is not MemberState.LEAVING:  # there is no way back
            member.state, member.reason = state, reason
        self.ring()

    # ------------------------------------------------------------------------------------------------ choice

    def ring(self) -> None:
        """Let everyone who waits look again."""
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._has_changed.wait()

    async def wait_for_some(self, wait_s: float, is_given_up: Callable[[], bool] = lambda: False) -> list[Member]:
        """Those that serve, once one does; none when it is given up. Raises EngineUnreachable after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while not self.serving and not is_given_up():
                    await self._has_changed.wait()
        except TimeoutError:
            raise EngineUnreachable(
                f"no server has served for {wait_s:g} s: {self._why_none()}; see their logs, or raise engine.wait_s"
            ) from None
        return self.serving

    async def until_idle(self, member: Member) -> None:
        """Return when it has no requests."""
        while member.num_requests:
            await self._has_changed.wait()

    def choose(self, input_ids: Sequence[int]) -> Member:
        """The server for a request, of those that serve; one at least does. Those that are behind come last."""
        serving = self.serving
        candidates = [member for member in serving if member.lag <= MAX_LAG] or serving
        url = self._router.choose(input_ids, {member.url: member.num_requests for member in candidates})
        return self._members[url]

    def _why_none(self) -> str:
        return "; ".join(f"{member.url} is {member.state}: {member.reason}" for member in self.members) or "it has none"
