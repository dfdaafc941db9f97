"""Who belongs to a fleet: servers join and leave while it works, and each has a keeper for as long as it belongs.

    add      verified, brought to the weights that are due ──▶ serving
    remove   leaving: no further requests ──▶ what it has in hand ends, or moves ──▶ gone
    follow   another process has seen to all that, and tells who has joined, who has left, and who is out for now

It owns the tasks of the keepers, and of the servers that leave. It knows no request and no push.
"""

import asyncio
import contextlib
from collections.abc import Callable

from areal_agent.engine.fleet.keeper import Keeper, Standard
from areal_agent.engine.fleet.member import Member, MemberEngine, MemberState
from areal_agent.engine.fleet.patience import Patience
from areal_agent.engine.fleet.roster import Roster
from areal_agent.engine.fleet.view import FleetView
from areal_agent.errors import EngineError, EngineUnreachable, ServerRefused
from areal_agent.types import WeightVersion

DRAIN_S = 30.0
"""How long requests at a server that is removed may take to end before they move."""

IDLE_POLL_S = 0.2


class Membership:
    """Changes the roster as servers come and go."""

    def __init__(
        self, roster: Roster, standard: Standard, connect: Callable[[str], MemberEngine], patience: Patience
    ) -> None:
        self._roster = roster
        self._standard = standard
        self._connect = connect
        self._patience = patience
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by URL
        self._leaving: set[asyncio.Task[None]] = set()
        self._view: FleetView | None = None  # what another process has said last
        self._is_closed = False

    def keep(self) -> None:
        """Every server has its keeper from now on."""
        for member in self._roster.members if not self._is_closed else ():
            if member.url not in self._keepers and member.state in (MemberState.SERVING, MemberState.QUARANTINED):
                keeper = Keeper(member, self._roster, self._standard, self._patience)
                self._keepers[member.url] = asyncio.create_task(keeper.run(), name=f"keeper of {member.url}")

    async def add(self, url: str) -> None:
        """One server more. Raises ServerRefused, EngineUnreachable, and WeightUpdateError when it does not follow."""
        member = Member(engine=self._connect(url), state=MemberState.CATCHING_UP, reason="it is being added")
        known = self._roster.find(member.url)
        if known is not None:
            await member.engine.aclose()
            is_leaving = known.state is MemberState.LEAVING
            how = "is just leaving; add it again once it is gone" if is_leaving else "is one of the servers already"
            raise ServerRefused(f"{member.url} {how}", code="known_server")
        self._roster.enter(member)
        try:
            keeper = Keeper(member, self._roster, self._standard, self._patience)
            await member.ask(lambda _: keeper.bring_back(is_new=True))  # a removal takes it away
        except BaseException as error:
            self._roster.forget(member)
            await member.engine.aclose()
            if isinstance(error, TimeoutError):
                raise EngineUnreachable(f"{member.url} does not answer; is it running? see its log") from None
            raise
        self.keep()

    async def remove(self, url: str, drain_s: float = DRAIN_S) -> None:
        """One server less, once no push is under way. It leaves also when this call is cancelled.

        Raises ServerRefused when it is none of them, or the last one.
        """
        await self._standard.settled()
        member = self._roster.find(url.rstrip("/"))
        if member is None or member.state is MemberState.LEAVING:
            known = ", ".join(member.url for member in self._roster.members)
            raise ServerRefused(f"{url!r} is none of the servers: {known}", code="unknown_server")
        self._require_another(member)
        await asyncio.shield(self._leave(member, drain_s))

    def follow(self, view: FleetView) -> None:
        """What another process says of the servers holds here, too."""
        self._view = view
        for url in (*view.serving, *view.out):
            if self._roster.find(url) is None:
                self._roster.enter(
                    Member(engine=self._connect(url), state=MemberState.QUARANTINED, reason="it has just joined")
                )
        for member in self._roster.members:
            member.is_loading = view.is_loading
            if member.url in view.out and member.state is MemberState.SERVING:
                self._roster.fall(member, view.out[member.url], is_lost=True)
            elif member.url in view.serving and member.state is MemberState.QUARANTINED:
                member.looked_after.set()
            elif member.url not in (*view.serving, *view.out) and member.state is not MemberState.LEAVING:
                self._leave(member, DRAIN_S)
        self.keep()

    def require_in(self, url: str, version: WeightVersion) -> None:
        """Raises EngineUnreachable while another process says that this server is out, or should have other weights."""
        if self._view is None:
            return
        if url in self._view.out:
            raise EngineUnreachable(f"{url} is out: {self._view.out[url]}")
        if self._view.versions and str(version) not in self._view.versions:
            raise EngineUnreachable(f"{url} serves version {version}, which is not what serves here")

    async def aclose(self) -> None:
        """End the tasks and close the connections. Harmless when done before."""
        self._is_closed = True
        tasks = {*self._keepers.values(), *self._leaving}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(member.engine.aclose() for member in self._roster.members))

    # ------------------------------------------------------------------------------------------- internals

    def _require_another(self, member: Member) -> None:
        others = [one for one in self._roster.members if one is not member and one.state is not MemberState.LEAVING]
        if not others:
            raise ServerRefused(f"{member.url} is the only server; add another one first", code="last_server")
        if member.state is MemberState.SERVING and self._roster.serving == [member]:
            how = "; ".join(f"{one.url} is {one.state}: {one.reason}" for one in others)
            raise ServerRefused(
                f"{member.url} is the only server that serves ({how}); add another one first", code="last_server"
            )

    def _leave(self, member: Member, drain_s: float) -> asyncio.Task[None]:
        drain_s = drain_s if member.state is MemberState.SERVING else 0.0
        self._roster.leave(member)
        task = asyncio.create_task(self._let_go(member, drain_s), name=f"leaving of {member.url}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def _let_go(self, member: Member, drain_s: float) -> None:
        keeper = self._keepers.pop(member.url, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait({keeper})
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(drain_s):
                await self._roster.until_idle(member)
                await _until_nobody_uses(member.engine)
        member.take_away_all("is being removed")
        self._roster.forget(member)
        await member.engine.aclose()
        if self._view is not None:  # it may have joined again meanwhile
            self.follow(self._view)


async def _until_nobody_uses(engine: MemberEngine) -> None:
    """Other processes may have requests there, too."""
    while (stats := await engine.stats()).num_running + stats.num_queued:  # noqa: ASYNC110 (a server tells nobody)
        await asyncio.sleep(IDLE_POLL_S)
