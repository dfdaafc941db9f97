"""All sessions of a gateway: look-up, limits, and ending those that nobody ends.

`Sessions` finds them by id and by the hash of their key; it keeps ended ones for a while. `Traffic` counts open
sessions and calls in flight against the limits. `Closing` ends silent sessions, and open ones when the gateway drains.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.metrics import Counters
from areal_agent.gateway.session import EndRequest, Session, SessionState
from areal_agent.types import Status

logger = logging.getLogger(__name__)

NUM_ENDED_KEPT = 256
"""The number of ended sessions kept for late callers and exports, so that memory does not grow with a run's length."""

DRAINING_RETRY_S = 30
"""Seconds until a client that a draining gateway refused may ask again; another gateway may be there by then."""

CALLS_RETRY_S = 1
SESSIONS_RETRY_S = 5

MAX_SWEEP_PERIOD_S = 30.0

END_GRACE_S = 10.0
"""Seconds that a draining gateway waits for sessions that are already ending."""


def session_exists(session_id: str) -> RequestError:
    """Return the error for a second session of this name."""
    return RequestError(
        f"session {session_id!r} exists already; choose another session_id, or leave it out",
        status=409,
        param="session_id",
        code="session_exists",
    )


class Sessions:
    """Finds sessions by id and by key."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key_hash: dict[str, Session] = {}
        self._ended: deque[Session] = deque()

    @property
    def num_open(self) -> int:
        return len(self._by_id) - len(self._ended)

    def require_free(self, session_id: str) -> None:
        """Raise RequestError when a session with this id exists."""
        if session_id in self._by_id:
            raise session_exists(session_id)

    def add(self, session: Session) -> None:
        self._by_id[session.record.id] = session
        self._by_key_hash[session.record.key_hash] = session

    def remove(self, session: Session) -> None:
        del self._by_id[session.record.id]
        del self._by_key_hash[session.record.key_hash]

    def with_key(self, key_hash: str) -> Session | None:
        return self._by_key_hash.get(key_hash)

    def with_id(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def is_open(self, session_id: str) -> bool:
        """Return whether the session is here and has not ended."""
        session = self._by_id.get(session_id)
        return session is not None and session.state is not SessionState.ENDED

    def ended(self, session_id: str) -> Session:
        """Return an ended session; raises RequestError when it does not exist or has not ended."""
        session = self._by_id.get(session_id)
        if session is None:
            raise RequestError(
                f"there is no session {session_id!r}; it never existed, or ended so long ago that "
                "only the ledger has it",
                status=404,
                param="session_id",
                code="session_not_found",
            )
        if session.state is not SessionState.ENDED:
            raise RequestError(
                f"session {session_id!r} is {session.state}; end it first",
                status=409,
                param="session_id",
                code="session_open",
            )
        return session

    def retire(self, session: Session) -> None:
        """Note that a session has ended. Forgets the one that ended longest ago once there are too many."""
        self._ended.append(session)
        if len(self._ended) > NUM_ENDED_KEPT:
            self.remove(self._ended.popleft())


@dataclass(kw_only=True, slots=True)
class _Use:
    """An open session's number of calls in flight and the time since when it has had none."""

    num_calls: int = 0
    silent_since_s: float


class Traffic:
    """Counts sessions and calls within `limits`.

    >>> traffic = Traffic(Limits(), now_s=iter([0.0, 1.0, 9.0]).__next__)
    >>> traffic.enter("session-1")
    >>> with traffic.call("session-1"):
    ...     traffic.num_calls
    1
    >>> traffic.silent_for(5.0)  # it is 9.0, and the call ended at 1.0
    ['session-1']
    """

    def __init__(self, limits: Limits, now_s: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now_s = now_s
        self._open: dict[str, _Use] = {}
        self.no_call = asyncio.Event()  # set while no call is in flight
        self.no_call.set()
        self.no_session = asyncio.Event()  # set while no session is open
        self.no_session.set()
        self.num_calls = 0
        self.is_draining = False

    def enter(self, session_id: str) -> None:
        """Count a new session; raises RequestError when there are too many or the gateway is draining."""
        if self.is_draining:
            raise _draining()
        if len(self._open) >= self._limits.max_sessions:
            raise RequestError(
                f"{len(self._open)} sessions are open, the limit of this gateway; end one, wait, or start it with a "
                "higher --max-sessions",
                status=429,
                code="too_many_sessions",
                retry_after_s=SESSIONS_RETRY_S,
            )
        self._open[session_id] = _Use(silent_since_s=self._now_s())
        self.no_session.clear()

    def leave(self, session_id: str) -> None:
        """Note that a session has ended. Does nothing if it was noted before."""
        self._open.pop(session_id, None)
        if not self._open:
            self.no_session.set()

    @contextlib.contextmanager
    def call(self, session_id: str, *, is_turn: bool = False) -> Generator[None]:
        """Count a session's call until it is answered; raises RequestError when it is refused.

        A draining gateway refuses new turns, but accepts rewards and ends.
        """
        if is_turn and self.is_draining:
            raise _draining()
        use = self._open.get(session_id) or _Use(silent_since_s=0.0)  # the session has ended: it is refused later
        if use.num_calls >= self._limits.max_calls_per_session:
            raise RequestError(
                f"{use.num_calls} calls of this session are in flight, the limit for a session; wait for one of them",
                status=429,
                code="too_many_calls",
                retry_after_s=CALLS_RETRY_S,
            )
        use.num_calls += 1
        self.num_calls += 1
        self.no_call.clear()
        try:
            yield
        finally:
            use.num_calls -= 1
            use.silent_since_s = self._now_s()
            self.num_calls -= 1
            if self.num_calls == 0:
                self.no_call.set()

    def open_sessions(self) -> list[str]:
        return list(self._open)

    def silent_for(self, duration_s: float) -> list[str]:
        """Return the open sessions that have had no call in flight for `duration_s`."""
        before_s = self._now_s() - duration_s
        return [name for name, use in self._open.items() if use.num_calls == 0 and use.silent_since_s <= before_s]


def _draining() -> RequestError:
    return RequestError(
        "this gateway is closing and starts nothing new; use another one, or retry later",
        status=503,
        code="draining",
        retry_after_s=DRAINING_RETRY_S,
    )


class Closing:
    """Ends sessions that `traffic` reports as open or silent. `find` returns the session with an id."""

    def __init__(self, traffic: Traffic, find: Callable[[str], Session | None], counters: Counters) -> None:
        self._traffic = traffic
        self._find = find
        self._counters = counters

    async def sweep(self, timeout_s: float) -> None:
        """Run the loop that ends sessions without a call for `timeout_s`, up to a quarter of that later.

        It waits only for the clock, and unblocks those that wait for the sessions' ends: groups and new sessions.
        """
        while True:
            await asyncio.sleep(min(timeout_s / 4, MAX_SWEEP_PERIOD_S))
            why = f"it made no call for {timeout_s:g} s"
            self._counters.ended_by_timeout += await self._end(self._traffic.silent_for(timeout_s), Status.TIMEOUT, why)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new turns and sessions, give calls in flight `timeout_s`, then end and count open sessions."""
        self._traffic.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._traffic.no_call.wait()
        num_ended = await self._end(self._traffic.open_sessions(), Status.CANCELLED, "the gateway closed")
        with contextlib.suppress(TimeoutError):  # for sessions that are already ending
            async with asyncio.timeout(END_GRACE_S):
                await self._traffic.no_session.wait()
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
        except RequestError:  # its owner ended it first
            return False
        except Exception:  # boundary: the other sessions must end all the same
            logger.exception("session %s could not be ended", session_id)
            self._traffic.leave(session_id)
            return False
        return True
