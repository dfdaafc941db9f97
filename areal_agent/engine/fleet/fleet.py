"""Several servers as one engine, which works as long as one of them does.

    generate ──▶ relay.py ── chooses from ──▶ Roster ◀── changes states ── keeper.py (a task for each server)
    push     ──▶ pushes.py ── tells all ─────▶  │                              │ brings back servers that failed
                    └─ the weights due ────────────────────────────────────────┘

Servers join and leave while it works:

    add      verified, given the weights that are due ──▶ serving
    remove   leaving: no further requests ──▶ its requests end, or move ──▶ gone
    follow   another process decides this, and tells which servers have joined, left, or are out for now

Keepers start with the first call; `aclose` ends them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from areal_agent.engine.fleet.keeper import Keeper
from areal_agent.engine.fleet.member import (
    FleetView,
    Member,
    MemberEngine,
    MemberState,
    Patience,
    Roster,
    Router,
    Versions,
    ask_all,
    check_model,
)
from areal_agent.engine.fleet.pushes import FleetPushes
from areal_agent.engine.fleet.relay import Relay
from areal_agent.engine.wire.control import EngineStats
from areal_agent.errors import EngineError, EngineRejected, EngineUnreachable, ServerRefused
from areal_agent.types import EngineInfo, GenerateRequest, GenerateResult, PauseMode, TokenChunk, Weights, WeightVersion

DRAIN_S = 30.0
"""Requests at a server that is being removed may take this long to end before they move."""

IDLE_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """One server's state, as shown to people."""

    url: str
    state: MemberState
    reason: str  # why it does not serve
    version: WeightVersion | None
    num_requests: int


class Fleet:
    """One engine (`protocols.Engine`) over one or more servers with the same model. Use it from one event loop.

    `streams_alone` says whether tokens are streamed when there is only one server. Streaming costs the server time;
    without it, an answer whose server dies starts again from the beginning.
    """

    def __init__(
        self,
        urls: Iterable[str],
        connect: Callable[[str], MemberEngine],
        *,
        patience: Patience | None = None,
        router: Router | None = None,
        streams_alone: bool = True,
    ) -> None:
        self._patience = patience or Patience()
        self._streams_alone = streams_alone
        self._connect = connect
        self.roster = Roster([Member(engine=connect(url)) for url in urls], router)
        self._versions = Versions(self._patience.probe_timeout_s)
        self.pushes = FleetPushes(self.roster, self._versions, self._patience)
        self._relays: dict[str, Relay] = {}  # by request id
        self._info: EngineInfo | None = None
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by URL
        self._leaving: set[asyncio.Task[None]] = set()
        self._view: FleetView | None = None  # the last view received from another process
        self._is_closed = False

    # ------------------------------------------------------------------------------------ protocols.Engine

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample at the server that fits best; if that fails, continue at another one from the tokens so far.

        Each token has the version that sampled it. A seed survives such a move if the draw at a position depends only
        on seed and position: with embedded engines, and with SGLang's under `--enable-deterministic-inference`.
        """
        self._keep()
        if request.request_id in self._relays:
            raise EngineRejected(f"a request {request.request_id!r} is in flight; give every request an id of its own")
        relay = self._relays[request.request_id] = Relay(
            request, on_chunk, self.roster, self._versions, self._patience, self._streams_alone
        )
        try:
            return await relay.run()
        finally:
            del self._relays[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End one request at whichever server it is; its `generate` returns the tokens so far."""
        relay = self._relays.get(request_id)
        if relay is not None:
            await relay.abort()

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            for relay in self._relays.values():
                relay.abort_soon()
        await self.pushes.pause(mode)

    async def resume(self) -> None:
        await self.pushes.resume()

    async def begin_push(self, push_id: str) -> None:
        """Open a push. Waits for a serving server if there is none."""
        self._keep()
        await self.pushes.begin(push_id)

    async def send_push(self, push_id: str, weights: Weights) -> None:
        await self.pushes.send(push_id, weights)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        """Switch to the new weights. Done when one server serves them; others stop serving until they do too."""
        await self.pushes.commit(push_id, version)

    async def abort_push(self, push_id: str) -> None:
        await self.pushes.abort(push_id)

    # -------------------------------------------------------------------------------------- what it serves

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until all servers serve. Raises EngineUnreachable when one does not within `timeout_s`."""
        waits = (member.engine.wait_ready(timeout_s) for member in self.roster.members)
        for failure in await asyncio.gather(*waits, return_exceptions=True):
            if failure is not None:
                raise failure

    async def info(self) -> EngineInfo:
        """Return what holds for all servers that answer. Raises EngineRejected when they serve different models.

        Where none answers it waits for one and asks again, as a request would.
        """
        self._keep()
        infos: dict[Member, EngineInfo] = {}
        failures: dict[Member, EngineError] = {}
        for _ in range(self._patience.max_failures):
            members = await self.roster.wait_for_some(self._patience.wait_s)
            infos, failures = await ask_all(members, lambda engine: engine.info())
            for member, error in failures.items():
                if not isinstance(error, EngineUnreachable):
                    raise error
                self.roster.fall(member, str(error))
            if infos:
                break
        else:
            raise next(iter(failures.values()))
        if len({info.vocab_size for info in infos.values()}) > 1:
            models = ", ".join(sorted({info.model_path for info in infos.values()}))
            raise EngineRejected(f"the servers of one engine serve different models: {models}; start them with one")
        for member, info in infos.items():
            member.version = info.weight_version
        self._info = replace(
            next(iter(infos.values())),
            weight_version=min(info.weight_version for info in infos.values()),
            max_context_tokens=min(info.max_context_tokens for info in infos.values()),
            has_grammar=all(info.has_grammar for info in infos.values()),
        )
        return self._info

    async def stats(self) -> EngineStats:
        """Return the sums over all servers that answer soon, and the state of the fleet."""
        serving = self.roster.serving
        told = [one for one in await asyncio.gather(*map(self._stats_of, serving)) if one is not None]
        return EngineStats(
            num_running=sum(one.num_running for one in told),
            num_queued=sum(one.num_queued for one in told),
            busy_s=told[0].busy_s if len(told) == len(self.roster.members) == 1 else None,
            generated_tokens=None,
            weight_version=self._version(),
            num_serving=len(serving),
            num_out=len(self.roster.members) - len(serving),
            num_moves=self.roster.num_moves,
        )

    def report(self) -> tuple[MemberReport, ...]:
        """Report the state of every server; the requests counted are those of this fleet."""
        return tuple(_report(member, member.num_requests) for member in self.roster.members)

    async def survey(self) -> tuple[MemberReport, ...]:
        """Report like `report`, but count all requests of each server that answers soon, including other processes'."""
        members = self.roster.members
        told = await asyncio.gather(*map(self._stats_of, members))
        return tuple(
            _report(member, member.num_requests if stats is None else stats.num_running + stats.num_queued)
            for member, stats in zip(members, told, strict=True)
        )

    # ------------------------------------------------------------------------------------- joining, leaving

    async def add(self, url: str) -> None:
        """Add a server: it is verified and given the weights that are due, and only then gets requests.

        Raises ServerRefused if it is one of the servers already or has another model, and EngineUnreachable or
        WeightUpdateError if it cannot serve.
        """
        member = Member(engine=self._connect(url), state=MemberState.CATCHING_UP, reason="it is being added")
        known = self.roster.find(member.url)
        if known is not None:
            await member.engine.aclose()
            is_leaving = known.state is MemberState.LEAVING
            how = "is being removed; add it again once it is gone" if is_leaving else "is one of the servers already"
            raise ServerRefused(f"{member.url} {how}", code="known_server")
        self.roster.enter(member)
        try:
            keeper = self._keeper_of(member)
            await member.ask(lambda _: keeper.bring_back(is_new=True))  # a removal cancels it
        except BaseException as error:
            self.roster.forget(member)
            await member.engine.aclose()
            if isinstance(error, TimeoutError):
                raise EngineUnreachable(f"{member.url} does not answer; is it running? see its log") from None
            raise
        self._keep()

    async def remove(self, url: str, drain_s: float = DRAIN_S) -> None:
        """Remove a server once no push is in progress. Its requests end there within `drain_s`, or continue elsewhere.

        It leaves even if this call is cancelled. Raises ServerRefused for the last server, or one that is unknown.
        """
        await self.pushes.settled()
        member = self.roster.find(url.rstrip("/"))
        if member is None or member.state is MemberState.LEAVING:
            known = ", ".join(member.url for member in self.roster.members)
            raise ServerRefused(f"{url!r} is not one of the servers: {known}", code="unknown_server")
        self._require_another(member)
        await asyncio.shield(self._leave(member, drain_s))

    def lose(self, url: str, why: str) -> None:
        """Move the requests of a server that is known to be gone; it is probed like any other that failed."""
        member = self.roster.find(url)
        if member is not None and member.state is MemberState.SERVING:
            self.roster.fall(member, why, is_lost=True)
            self._keep()  # where nothing was asked of it yet, nobody would bring it back

    def view(self) -> FleetView:
        """Return what other processes with a fleet of the same servers need to know."""
        members = [member for member in self.roster.members if member.state is not MemberState.LEAVING]
        return FleetView(
            serving=tuple(member.url for member in members if member.state is MemberState.SERVING),
            out={member.url: member.reason for member in members if member.state is not MemberState.SERVING},
            versions=tuple(map(str, self.pushes.served)),
            is_loading=self.pushes.is_loading,
        )

    def follow(self, view: FleetView) -> None:
        """Apply what the process that pushes reports about the servers and their weights."""
        self._view = view
        for version in view.versions:
            self._versions.begin(WeightVersion.parse(version))
        for url in (*view.serving, *view.out):
            if self.roster.find(url) is None:
                self.roster.enter(
                    Member(engine=self._connect(url), state=MemberState.QUARANTINED, reason="it has just joined")
                )
        for member in self.roster.members:
            member.is_loading = view.is_loading
            if member.url in view.out and member.state is MemberState.SERVING:
                self.roster.fall(member, view.out[member.url], is_lost=True)
            elif member.url in view.serving and member.state is MemberState.QUARANTINED:
                member.looked_after.set()
            elif member.url not in (*view.serving, *view.out) and member.state is not MemberState.LEAVING:
                self._leave(member, DRAIN_S)
        self._keep()

    async def aclose(self) -> None:
        """End the tasks and close the connections. Calling it again does nothing."""
        self._is_closed = True
        tasks = {*self._keepers.values(), *self._leaving}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(member.engine.aclose() for member in self.roster.members))

    # ------------------------------------------------------------------------------------------- internals

    def _keep(self) -> None:
        """Start a keeper for every server that has none."""
        for member in self.roster.members if not self._is_closed else ():
            if member.url not in self._keepers and member.state in (MemberState.SERVING, MemberState.QUARANTINED):
                keeper = self._keeper_of(member)
                self._keepers[member.url] = asyncio.create_task(keeper.run(), name=f"keeper of {member.url}")

    def _keeper_of(self, member: Member) -> Keeper:
        return Keeper(member, self.roster, self.pushes, self._check, self._patience)

    def _check(self, url: str, info: EngineInfo) -> None:
        """Raise EngineError if another process reports that this server is out, or if it has other weights or model."""
        if self._view is not None and url in self._view.out:
            raise EngineUnreachable(f"{url} is out: {self._view.out[url]}")
        if self._view is not None and self._view.versions and str(info.weight_version) not in self._view.versions:
            raise EngineUnreachable(f"{url} serves version {info.weight_version}, which is not the version served here")
        if self._info is not None:
            check_model(url, info, self._info)

    def _require_another(self, member: Member) -> None:
        others = [one for one in self.roster.members if one is not member and one.state is not MemberState.LEAVING]
        if not others:
            raise ServerRefused(f"{member.url} is the only server; add another one first", code="last_server")
        if member.state is MemberState.SERVING and self.roster.serving == [member]:
            how = "; ".join(f"{one.url} is {one.state}: {one.reason}" for one in others)
            raise ServerRefused(
                f"{member.url} is the only server that serves ({how}); add another one first", code="last_server"
            )

    def _leave(self, member: Member, drain_s: float) -> asyncio.Task[None]:
        drain_s = drain_s if member.state is MemberState.SERVING else 0.0
        self.roster.leave(member)
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
                await self.roster.until_idle(member)
                await _until_nobody_uses(member.engine)
        member.take_away_all("is being removed")
        self.roster.forget(member)
        await member.engine.aclose()
        if self._view is not None:  # the server may have joined again meanwhile
            self.follow(self._view)

    async def _stats_of(self, member: Member) -> EngineStats | None:
        """Return None when the server does not answer soon."""
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(self._patience.probe_timeout_s):
                return await member.engine.stats()
        return None

    def _version(self) -> WeightVersion:
        """Return the version that serves, as far as is known."""
        if self.pushes.due is not None:
            return self.pushes.due.version
        return min((member.version for member in self.roster.serving if member.version), default=WeightVersion())


async def _until_nobody_uses(engine: MemberEngine) -> None:
    """Wait for the requests of other processes as well."""
    while (stats := await engine.stats()).num_running + stats.num_queued:  # noqa: ASYNC110 (a server tells nobody)
        await asyncio.sleep(IDLE_POLL_S)


def _report(member: Member, num_requests: int) -> MemberReport:
    return MemberReport(
        url=member.url, state=member.state, reason=member.reason, version=member.version, num_requests=num_requests
    )
