"""Finds the workflow that blocks an event loop, and warns with its line.

A thread beside the loop asks it to answer. While the answer is late, the thread looks where the loop is stuck and warns
once per place, also when the loop never answers again. Its clock stands still while the loop's thread waits for a core:
a busy machine is nobody's fault. Linux tells how long a thread has waited (`/proc/.../schedstat`, second number,
nanoseconds); on other systems the clock simply goes on.
"""

import asyncio
import linecache
import logging
import selectors
import sys
import sysconfig
import threading
import time
import traceback
from asyncio import base_events
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)


ROLLOUT_TASK = "rollout "
"""The prefix of the names of tasks that run a workflow; the session's id follows."""

REMEDY = "use await asyncio.sleep, an async client, or await asyncio.to_thread(...)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """True when its file is Python's own, installed, or areal_agent's, and so not a workflow's."""
        return self.file.startswith(_LIBRARIES) or "site-packages" in self.file or "dist-packages" in self.file


_IMPORTLIB = "<frozen importlib"

_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    str(Path(__file__).parent.parent),
    "<frozen ",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blockage:
    """The place and task that held up an event loop. `task` is the name of the asyncio task, None outside of tasks."""

    place: Frame
    task: str | None
    is_importing: bool = False  # Python is importing modules for this line, which happens once

    def describe(self, seconds: float) -> str:
        """Return one line: who blocks, for how long, where, and what to do instead."""
        path = Path(self.place.file)
        file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        where = f"{file}:{self.place.line} in {self.place.function}"
        source = linecache.getline(self.place.file, self.place.line).strip()
        where = f"{where}: {source}" if source else where
        if self.place.is_library or self.is_importing:
            return f"the event loop has not answered for {seconds:.1f} s; it is at {where}"
        is_named = self.task is not None and self.task.startswith(ROLLOUT_TASK)
        who = self.task if is_named else f"a workflow (task {self.task})"
        return f"{who} has blocked the event loop for {seconds:.1f} s at {where}; {REMEDY}"


def frames_of(innermost: FrameType) -> tuple[Frame, ...]:
    """Return a stack as plain data, innermost first."""
    return tuple(
        Frame(file=frame.f_code.co_filename, line=line, function=frame.f_code.co_name)
        for frame, line in traceback.walk_stack(innermost)
    )


def find_blockage(frames: Sequence[Frame], task: str | None) -> Blockage | None:
    """Return what blocks the loop on this stack (innermost first); None when it only waits for events.

    The place is the innermost line of a workflow, or the innermost line of all when there is none.
    """
    # frames outside the loop's step belong to the program that waits for it
    inside = tuple(takewhile(lambda one: (one.file, one.function) != (base_events.__file__, "_run_once"), frames))
    is_waiting = not inside or (len(inside) == 1 and inside[0].file == selectors.__file__)
    if is_waiting:  # the machine was busy elsewhere
        return None
    depth = next((depth for depth, frame in enumerate(inside) if not frame.is_library), 0)
    is_importing = any(frame.file.startswith(_IMPORTLIB) for frame in inside[:depth])
    return Blockage(place=inside[depth], task=task, is_importing=is_importing)


THREADS = Path("/proc/self/task")


def clock_of_thread(native_thread_id: int, threads: Path = THREADS) -> Callable[[], float]:
    """Return a clock in seconds, of which only differences mean anything. `threads` holds a folder per thread."""
    schedstat = threads / str(native_thread_id) / "schedstat"

    def now() -> float:
        try:
            waited_ns = int(schedstat.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            waited_ns = 0
        return time.monotonic() - waited_ns / 1e9

    return now


LOOKS_A_WARNING = 4
"""The number of times the thread looks within the time after which it warns."""


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
        """Make a watchdog for the running loop. Call it on the loop's thread."""
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
        """Send a ping, or look what keeps the last one from its answer. The thread calls it."""
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
                if blockage.place not in self._warned:
                    self._warned.add(blockage.place)
                    logger.warning("%s", blockage.describe(seconds))

    def _answer(self, ping: _Ping) -> None:
        """Answer a ping, on the loop. Only delays whose place was seen count: a busy machine delays idle loops too."""
        if ping.is_blocked:
            self.blocked_s += self._now() - ping.sent_s
        self._ping = None

    def _watch(self) -> None:
        while not self._stopped.wait(self._warn_s / LOOKS_A_WARNING):
            self.check()
