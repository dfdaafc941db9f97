"""Watches one server of a fleet, and brings it back after a failure.

serving       The server is probed every few seconds. An error means that it is down. A silent server counts as hung
              once it has neither answered nor sampled a token for `hung_after_s`; a slow server is left alone.
quarantined   The server is probed again and again. When it answers it is verified and given the weights that are due.
              Then it serves, unless a push is in progress: then after the push, with the weights that are due by then.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from areal_agent.engine.fleet.member import Member, MemberState, Patience, Roster
from areal_agent.engine.fleet.pushes import Due, FleetPushes, bring_to
from areal_agent.errors import EngineError, EngineUnreachable
from areal_agent.types import EngineInfo

logger = logging.getLogger(__name__)


class Keeper:
    """Looks after one member. `run` until cancelled."""

    def __init__(
        self,
        member: Member,
        roster: Roster,
        pushes: FleetPushes,
        check: Callable[[str, EngineInfo], None],
        patience: Patience,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check` raises EngineError for a server that must not serve."""
        self._member = member
        self._roster = roster
        self._pushes = pushes
        self._check = check
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
            await self._pushes.settled()
            due, info = self._pushes.due, await self._info()
            self._check(self._member.url, info)
            if due is None:
                await self._require_health()
            else:
                await bring_to(self._member.engine, due, is_label_believed=not is_new)
            if not self._pushes.is_changing and self._pushes.due is due:
                break
        self._check(self._member.url, info)  # another process may have reported something meanwhile
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
        due, is_settled = self._pushes.due, not self._pushes.is_changing
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
        if is_settled and not self._pushes.is_changing and self._pushes.due is due:
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
