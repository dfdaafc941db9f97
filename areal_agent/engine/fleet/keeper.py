"""Watches one server of a fleet, and brings it back after a failure.

serving       The server is probed every few seconds. An error means that it is down. A silent server counts as hung
              once it has neither answered nor sampled a token for `hung_after_s`; a slow server is left alone.
quarantined   The server is probed again and again. When it answers it is verified and given the weights that are due.
              Then it serves, unless a push is in progress: then after the push, with the weights that are due by then.

`bring_to` gives a server the weights that are due:

    label right ──────────────────────────────▶ it may serve
    label wrong ──▶ load, or push to it alone ──▶ label read back ──▶ it may serve
                       └─ if it is ahead, a model is loaded as 0:0 before the push, as versions only go up

Weights in shared memory may have been overwritten by newer ones meanwhile: then the push fails its checksum, and the
server gets the newer weights at the next attempt.
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
    """The version that every server has to serve, and its weights: a model's folder, or the push `push_id`."""

    version: WeightVersion
    source: Path | Weights | None  # None: unknown
    push_id: str = ""
    base: Path | None = None  # a model folder that a push may start from; None: the one that a server was started with


async def bring_to(engine: MemberEngine, due: Due, *, is_label_believed: bool = True) -> None:
    """Make the server serve these weights. Raises EngineError if it does not."""
    info = await engine.info()
    served = info.weight_version
    if served == due.version and (is_label_believed or due.source is None) and await engine.health():
        await engine.resume()  # an interrupted push may have left it paused
        return
    match due.source:
        case None:
            raise WeightUpdateError(
                f"{engine.base_url} serves version {served}, but {due.version} is due, and this fleet has no weights "
                "of that; start it with those, or wait for the next push"
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
        raise WeightUpdateError(f"{engine.base_url} reports that it serves {served} after a push of {version}")


async def _push(engine: MemberEngine, push_id: str, weights: Weights, version: WeightVersion) -> None:
    """Push to this server alone. After a failure it stays paused, because it may serve the wrong weights."""
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
    """The fleet's requirements on a server."""

    @property
    def due(self) -> Due | None:
        """The weights that are due; None if other processes push and this fleet only watches."""
        ...

    @property
    def is_changing(self) -> bool:
        """True during a push or a pause: no server joins meanwhile, and labels may differ."""
        ...

    async def settled(self) -> None:
        """Wait until no push or pause is in progress."""
        ...

    def check(self, url: str, info: EngineInfo) -> None:
        """Raise ServerRefused for another model than the fleet's, and EngineUnreachable for a server that is out."""
        ...


class Keeper:
    """Looks after one member. `run` until cancelled."""

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
        self._looked_s = now()  # when the server's state was last observed
        self._num_silent = 0  # probes in a row without an answer

    async def run(self) -> None:
        """Look at the server in intervals, and at once when it is wanted."""
        while True:
            self._member.looked_after.clear()
            try:
                await self._look()
            except Exception as error:  # the boundary: any error counts as a failure of this server
                logger.exception("%s could not be looked after", self._member.url)
                self._roster.fall(self._member, f"it could not be looked after: {error!r}")
                self._member.looked_after.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.probe_every_s):
                    await self._member.looked_after.wait()

    async def bring_back(self, *, is_new: bool = False) -> None:
        """Return when the server serves. Raises EngineError, and TimeoutError when it does not answer.

        The label of a new server is not trusted, because it may come from another run.
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
        self._standard.check(self._member.url, info)  # another process may have reported something meanwhile
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
        """Record that the server has answered."""
        self._member.heard_s = self._looked_s = self._now()
        self._num_silent = 0

    def _judge_silence(self) -> None:
        member, now_s = self._member, self._now()
        if member.is_loading:  # loading may take any time: the call itself has a limit
            self._hear()
            return
        member.heard_s = min(now_s, member.heard_s + self._slept_s(now_s))
        self._looked_s = now_s
        self._num_silent += 1
        silent_s = now_s - member.heard_s
        if silent_s >= self._patience.hung_after_s and self._num_silent > 1:
            why = f"it hangs: it has for {silent_s:.0f} s neither answered nor sampled a token"
            self._roster.fall(member, why, is_lost=True)

    def _slept_s(self, now_s: float) -> float:
        """Return how long this process was suspended since the last look; such a silence is not the server's fault."""
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
                raise EngineUnreachable(f"{self._member.url} reports that it is not healthy; see its log")

    # ---------------------------------------------------------------------------------------- quarantined

    async def _try_to_return(self) -> None:
        try:
            await self.bring_back()
        except (EngineError, TimeoutError) as error:
            reason = "it does not answer" if isinstance(error, TimeoutError) else str(error)
            self._roster.fall(self._member, reason)
            self._member.looked_after.clear()  # so that it is probed again only after the interval
