"""Watches one server of a fleet, and brings it back when it has fallen. It knows no other server and no request.

serving       asked every few seconds how it is. An error says that it is down. Silence says nothing until it has
              neither answered nor sampled a token for `hung_after_s`: then it hangs. One that is slow is left alone
quarantined   asked again and again. When it answers: verified, brought to the weights that are due, and then it
              serves, unless a push is under way: then once that is over, and with what is due after it

The weights that every server of a fleet has to serve, and how one that does not is brought to them.

    label right ──────────────────────────────▶ it may serve
    label wrong ──▶ load, or push to it alone ──▶ label read back ──▶ it may serve
                       └─ a push to one that is ahead: a model first, as 0:0, for versions only go up

A push in memory is double-buffered by its sender: one that has been overwritten meanwhile fails its checksum, and the
server is brought to the newer weights the next time. Knows one server at a time, and no state of it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_agent.engine.fleet.member import Member, MemberEngine, MemberState, Patience, Roster
from areal_agent.errors import EngineError, EngineUnreachable, WeightUpdateError
from areal_agent.types import EngineInfo, PauseMode, Weights, WeightVersion

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """The version, and where its weights are: a model's folder, or what was pushed as `push_id`."""

    version: WeightVersion
    source: Path | Weights | None  # None: nobody has said
    push_id: str = ""
    base: Path | None = None  # a model folder that a push may follow on; None: that which a server was started with


async def bring_to(engine: MemberEngine, due: Due, *, is_label_believed: bool = True) -> None:
    """Return when the server serves these weights. Raises EngineError when it does not."""
    info = await engine.info()
    served = info.weight_version
    if served == due.version and (is_label_believed or due.source is None) and await engine.health():
        await engine.resume()  # a push that broke off may have left it paused
        return
    match due.source:
        case None:
            raise WeightUpdateError(
                f"{engine.base_url} serves version {served}, and {due.version} is due, of which this fleet has no "
                "weights; start it with those, or wait for the next push"
            )
        case Path() as model:
            await engine.load(model, due.version)
        case weights:
            if served >= due.version:
                await engine.load(due.base or Path(info.model_path), WeightVersion())
            await _push(engine, due.push_id, weights, due.version)
    await require_version(engine, due.version)
    if not await engine.health():
        raise EngineUnreachable(f"{engine.base_url} does not serve after it was given version {due.version}")


async def require_version(engine: MemberEngine, version: WeightVersion) -> None:
    """Read the label back. Raises WeightUpdateError when it is another."""
    served = (await engine.info()).weight_version
    if served != version:
        raise WeightUpdateError(f"{engine.base_url} says that it serves {served} after a push of {version}")


async def _push(engine: MemberEngine, push_id: str, weights: Weights, version: WeightVersion) -> None:
    """To this one alone. Where it fails it stays paused: whatever it serves, it is not what is due."""
    try:
        await engine.begin_push(push_id)
        await engine.send_push(push_id, weights)
        await engine.pause(PauseMode.RETRACT)
        await engine.commit_push(push_id, version)
        await engine.resume()
    except BaseException:
        with contextlib.suppress(EngineError):
            await engine.abort_push(push_id)
        raise


class Standard(Protocol):
    """What a server has to be to serve."""

    @property
    def due(self) -> Due | None:
        """None: others push, and this fleet only looks."""
        ...

    @property
    def is_changing(self) -> bool:
        """Whether a push is under way, or a pause: nobody joins meanwhile, and labels may differ."""
        ...

    async def settled(self) -> None:
        """Return when that is over."""
        ...

    def check(self, url: str, info: EngineInfo) -> None:
        """Raises ServerRefused for another model than the fleet's, and EngineUnreachable for one that is out."""
        ...


class Keeper:
    """Of one member. `run` until cancelled."""

    def __init__(
        self,
        member: Member,
        roster: Roster,
        standard: Standard,
        patience: Patience,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member = member
        self._roster = roster
        self._standard = standard
        self._patience = patience
        self._now = now
        self._looked_s = now()  # when it was last seen how the server is
        self._num_silent = 0  # probes in a row without an answer

    async def run(self) -> None:
        """Look after it."""
        while True:
            self._member.looked_after.clear()
            try:
                await self._look()
            except Exception as error:  # the boundary: whatever goes wrong with a server is that server's failure
                logger.exception("%s could not be looked after", self._member.url)
                self._roster.fall(self._member, f"it could not be looked after: {error!r}")
                self._member.looked_after.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.probe_every_s):
                    await self._member.looked_after.wait()

    async def bring_back(self, *, is_new: bool = False) -> None:
        """Return when it serves. Raises EngineError, and TimeoutError when it does not say how it is.

        The label of one that is new is not believed: it may be that of another run.
        """
        self._roster.catch_up(self._member)
        while True:
            await self._standard.settled()
            due, info = self._standard.due, await self._info()
            self._standard.check(self._member.url, info)
            if due is None:
                await self._require_health()
            else:
                await bring_to(self._member.engine, due, is_label_believed=not is_new)
            if not self._standard.is_changing and self._standard.due is due:
                break
        self._standard.check(self._member.url, info)  # another process may have spoken meanwhile
        self._member.version = info.weight_version if due is None else due.version
        self._hear()
        self._roster.serve(self._member)

    async def _look(self) -> None:
        match self._member.state:
            case MemberState.SERVING:
                await self._probe()
            case MemberState.QUARANTINED:
                await self._try_to_return()
            case _:
                pass

    # -------------------------------------------------------------------------------------------- serving

    async def _probe(self) -> None:
        due, is_settled = self._standard.due, not self._standard.is_changing
        try:
            info = await self._info()
            await self._require_health()
        except TimeoutError:
            self._judge_silence()
            return
        except EngineError as error:
            if not self._member.is_loading:
                self._roster.fall(self._member, str(error))
            return
        self._hear()
        if is_settled and not self._standard.is_changing and self._standard.due is due:
            self._judge_label(info, due)

    def _hear(self) -> None:
        """It has said how it is."""
        self._member.heard_s = self._looked_s = self._now()
        self._num_silent = 0

    def _judge_silence(self) -> None:
        member, now_s = self._member, self._now()
        if member.is_loading:  # as long as it takes: the call itself has a time limit
            self._hear()
            return
        member.heard_s = min(now_s, member.heard_s + self._slept_s(now_s))
        self._looked_s = now_s
        self._num_silent += 1
        silent_s = now_s - member.heard_s
        if silent_s >= self._patience.hung_after_s and self._num_silent > 1:
            why = f"it hangs: for {silent_s:.0f} s it has neither answered nor sampled a token"
            self._roster.fall(member, why, is_lost=True)

    def _slept_s(self, now_s: float) -> float:
        """How long this process has not run since the last look: a silence of that time is its own."""
        longest_s = self._patience.probe_every_s + 2 * self._patience.probe_timeout_s
        return max(0.0, now_s - self._looked_s - longest_s)

    def _judge_label(self, info: EngineInfo, due: Due | None) -> None:
        member = self._member
        member.version = info.weight_version
        if due is not None and info.weight_version != due.version:
            why = f"it serves version {info.weight_version}, and {due.version} is due"
            self._roster.fall(member, why, is_lost=True)
        newest = self._roster.newest_version
        member.lag = 0 if newest is None or member.version >= newest else member.lag + 1

    async def _info(self) -> EngineInfo:
        async with asyncio.timeout(self._patience.probe_timeout_s):
            return await self._member.engine.info()

    async def _require_health(self) -> None:
        async with asyncio.timeout(self._patience.probe_timeout_s):
            if not await self._member.engine.health():
                raise EngineUnreachable(f"{self._member.url} says that it is not healthy; see its log")

    # ---------------------------------------------------------------------------------------- quarantined

    async def _try_to_return(self) -> None:
        try:
            await self.bring_back()
        except (EngineError, TimeoutError) as error:
            reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
            self._roster.fall(self._member, reason)
            self._member.looked_after.clear()  # it is asked again after a while
