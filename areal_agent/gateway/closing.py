"""How sessions end that nobody ends: those that fell silent, and those that a closing gateway still has."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from areal_agent.errors import RequestError
from areal_agent.gateway.control import EndRequest
from areal_agent.gateway.session import Session
from areal_agent.gateway.stats import Counters
from areal_agent.gateway.traffic import Traffic
from areal_agent.types import Status

logger = logging.getLogger(__name__)

MAX_SWEEP_PERIOD_S = 30.0

END_GRACE_S = 10.0
"""How long a draining gateway waits for sessions that are ending by themselves."""


class Closing:
    """Ends sessions, by the accounts of `traffic`. `find` gives the session of an id."""

    def __init__(self, traffic: Traffic, find: Callable[[str], Session | None], counters: Counters) -> None:
        self._traffic = traffic
        self._find = find
        self._counters = counters

    async def sweep(self, timeout_s: float) -> None:
        """The loop that ends sessions without a call for `timeout_s`, up to a quarter of that later; until cancelled.

        It waits for the clock alone. It unblocks whoever waits for those sessions: their groups, and new sessions.
        """
        while True:
            await asyncio.sleep(min(timeout_s / 4, MAX_SWEEP_PERIOD_S))
            why = f"it made no call for {timeout_s:g} s"
            self._counters.ended_by_timeout += await self._end(self._traffic.silent_for(timeout_s), Status.TIMEOUT, why)

    async def drain(self, timeout_s: float) -> int:
        """Start nothing new, give calls in flight so long to finish, then end what is open. How many it had to end."""
        self._traffic.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._traffic.wait_until_quiet()
        num_ended = await self._end(self._traffic.open_sessions(), Status.CANCELLED, "the gateway closed")
        with contextlib.suppress(TimeoutError):  # what is ending by itself
            async with asyncio.timeout(END_GRACE_S):
                await self._traffic.wait_until_empty()
        return num_ended

    async def _end(self, session_ids: Iterable[str], status: Status, why: str) -> int:
        ended = await asyncio.gather(*(self._end_one(session_id, status, why) for session_id in session_ids))
        return sum(ended)

    async def _end_one(self, session_id: str, status: Status, why: str) -> bool:
        session = self._find(session_id)
        if session is None:
            return False
        try:
            await session.end(EndRequest.read({"status": status, "error": why}))
        except RequestError:  # its owner was faster
            return False
        except Exception:  # the boundary: the other sessions are to end all the same
            logger.exception("session %s could not be ended", session_id)
            self._traffic.leave(session_id)
            return False
        return True
