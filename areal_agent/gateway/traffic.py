"""Which sessions are open and which of their calls are in flight: who may come in, and who has been silent for long.

Pure accounting by session id; it knows no session, no HTTP, and ends nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from areal_agent.errors import RequestError
from areal_agent.gateway.limits import Limits

DRAINING_RETRY_S = 30
"""When a client that a draining gateway sent away may ask again: another gateway may stand there by then."""

CALLS_RETRY_S = 1
SESSIONS_RETRY_S = 5


@dataclass(kw_only=True, slots=True)
class _Use:
    """One open session: its calls in flight, and when the last of them ended."""

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
        self._no_call = asyncio.Event()
        self._no_call.set()
        self._no_session = asyncio.Event()
        self._no_session.set()
        self.num_calls = 0
        self.is_draining = False

    def enter(self, session_id: str) -> None:
        """A session opens; raises RequestError when there are too many, or when the gateway is closing."""
        if self.is_draining:
            raise _draining()
        if len(self._open) >= self._limits.max_sessions:
            raise RequestError(
                f"{len(self._open)} sessions are open, which is all that this gateway takes at once; end one, wait, or "
                "start it with a higher --max-sessions",
                status=429,
                code="too_many_sessions",
                retry_after_s=SESSIONS_RETRY_S,
            )
        self._open[session_id] = _Use(silent_since_s=self._now_s())
        self._no_session.clear()

    def leave(self, session_id: str) -> None:
        """A session has ended. Harmless when it has left already."""
        self._open.pop(session_id, None)
        if not self._open:
            self._no_session.set()

    @contextlib.contextmanager
    def call(self, session_id: str, *, is_turn: bool = False) -> Generator[None]:
        """A call of a session, from its arrival to its answer; raises RequestError when it may not come in.

        While the gateway is draining, no new turn begins; rewards and ends are still heard.
        """
        if is_turn and self.is_draining:
            raise _draining()
        use = self._open.get(session_id) or _Use(silent_since_s=0.0)  # of an ended session: refused further in
        if use.num_calls >= self._limits.max_calls_per_session:
            raise RequestError(
                f"{use.num_calls} calls of this session are in flight, which is all that it may have at once; "
                "wait for one of them",
                status=429,
                code="too_many_calls",
                retry_after_s=CALLS_RETRY_S,
            )
        self._begin(use)
        try:
            yield
        finally:
            self._end(use)

    def open_sessions(self) -> list[str]:
        return list(self._open)

    def silent_for(self, duration_s: float) -> list[str]:
        """The open sessions that have had no call in flight for so long."""
        before_s = self._now_s() - duration_s
        return [name for name, use in self._open.items() if use.num_calls == 0 and use.silent_since_s <= before_s]

    async def wait_until_quiet(self) -> None:
        """Wait until no call is in flight."""
        await self._no_call.wait()

    async def wait_until_empty(self) -> None:
        """Wait until no session is open."""
        await self._no_session.wait()

    def _begin(self, use: _Use) -> None:
        use.num_calls += 1
        self.num_calls += 1
        self._no_call.clear()

    def _end(self, use: _Use) -> None:
        use.num_calls -= 1
        use.silent_since_s = self._now_s()
        self.num_calls -= 1
        if self.num_calls == 0:
            self._no_call.set()


def _draining() -> RequestError:
    return RequestError(
        "this gateway is closing: it starts nothing new; ask another one, or later",
        status=503,
        code="draining",
        retry_after_s=DRAINING_RETRY_S,
    )
