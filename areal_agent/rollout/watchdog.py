"""Names the workflow that blocks an event loop. It knows the loop by a ping, not what runs there.

A thread beside the loop asks it to answer. While the answer is late, the thread looks where the loop is stuck, and
warns once a place: also of a loop that never answers again.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from areal_agent.rollout.blocking import Blockage, Frame, find_blockage, frames_of
from areal_agent.rollout.loop_clock import clock_of_thread

logger = logging.getLogger(__name__)

LOOKS_A_WARNING = 4
"""How often the thread looks within the time after which it warns."""


@dataclass(slots=True)
class _Ping:
    sent_s: float
    has_looked: bool = False
    is_blocked: bool = False


class Watchdog:
    """Watches one loop.

    ::

        with Watchdog.of_this_loop(warn_s=1.0) as watchdog:
            ...
        watchdog.blocked_s
    """

    def __init__(
        self,
        *,
        warn_s: float,
        ping: Callable[[Callable[[], None]], object],
        look: Callable[[], Blockage | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocked_s = 0.0
        self._warn_s = warn_s
        self._send = ping
        self._look = look
        self._now = now
        self._ping: _Ping | None = None
        self._warned: set[Frame] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def of_this_loop(cls, *, warn_s: float) -> Self:
        """For the running loop, on whose thread this is called."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()

        def look() -> Blockage | None:
            innermost = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] (documented)
            task = asyncio.current_task(loop)
            name = None if task is None else task.get_name()
            return None if innermost is None else find_blockage(frames_of(innermost), name)

        clock = clock_of_thread(threading.get_native_id())
        return cls(warn_s=warn_s, ping=loop.call_soon_threadsafe, look=look, now=clock)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def check(self) -> None:
        """One look, on the thread: send a ping, or see what keeps the last one from its answer."""
        ping = self._ping
        if ping is None:
            self._ping = ping = _Ping(sent_s=self._now())
            self._send(lambda: self._answer(ping))
            return
        seconds = self._now() - ping.sent_s
        if seconds >= self._warn_s and not ping.has_looked:
            ping.has_looked = True
            blockage = self._look()
            if blockage is not None:
                ping.is_blocked = True
                self._warn(blockage, seconds)

    def _answer(self, ping: _Ping) -> None:
        """On the loop. Only a delay whose place was seen counts: a busy machine delays an idle loop too."""
        if ping.is_blocked:
            self.blocked_s += self._now() - ping.sent_s
        self._ping = None

    def _warn(self, blockage: Blockage, seconds: float) -> None:
        if blockage.place not in self._warned:
            self._warned.add(blockage.place)
            logger.warning("%s", blockage.describe(seconds))

    def _watch(self) -> None:
        while not self._stopped.wait(self._warn_s / LOOKS_A_WARNING):
            self.check()
