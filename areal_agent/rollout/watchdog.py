"""Finds the workflow that blocks an event loop, warns with its line, and ends what blocks it beyond a limit.

A thread beside the loop asks it to answer. While the answer is late, the thread looks where the loop is stuck and warns
once per place, also when the loop never answers again. Its clock stands still while the loop's thread waits for a core:
a busy machine is nobody's fault. Linux tells how long a thread has waited (`/proc/.../schedstat`, second number,
nanoseconds); on other systems the clock simply goes on.

Beyond the limit, a signal makes the loop's thread raise `LoopBlocked` in the workflow, which ends sleeps, waits and
loops of Python. If it blocks on, the thread ends the process. Where C code lets no thread run, `faulthandler` does.
"""

import asyncio
import faulthandler
import linecache
import logging
import os
import selectors
import signal
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
from typing import Any, Self

from areal_agent.errors import LoopBlocked

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
    """The place and task that held up an event loop.

    `task` is the name of the asyncio task; None outside of tasks, and in the one of the program that runs rollouts.
    """

    place: Frame
    task: str | None
    is_importing: bool = False  # Python is importing modules for this line, which happens once

    @property
    def is_workflows(self) -> bool:
        """True when a workflow is to blame, or a task that it has started."""
        return self.task is not None and not self.place.is_library

    @property
    def where(self) -> str:
        """Return `my_agent.py:4 in solve: time.sleep(5)`."""
        path = Path(self.place.file)
        file = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        source = linecache.getline(self.place.file, self.place.line).strip()
        return f"{file}:{self.place.line} in {self.place.function}{f': {source}' if source else ''}"

    def describe(self, seconds: float) -> str:
        """Return one line: who blocks, for how long, where, and what to do instead."""
        if self.place.is_library or self.is_importing:
            return f"the event loop has not answered for {seconds:.1f} s; it is at {self.where}"
        is_named = self.task is not None and self.task.startswith(ROLLOUT_TASK)
        who = self.task if is_named else f"a workflow (task {self.task})" if self.task else "the program"
        return f"{who} has blocked the event loop for {seconds:.1f} s at {self.where}; {REMEDY}"


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


def watch_this_loop() -> Callable[..., Blockage | None]:
    """Return a function that finds, from any thread, what blocks the running loop, or what does at a frame of it."""
    loop, thread_id, program = asyncio.get_running_loop(), threading.get_ident(), asyncio.current_task()

    def look(frame: FrameType | None = None) -> Blockage | None:
        innermost = frame or sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] (documented)
        task = asyncio.current_task(loop)
        name = None if task is None or task is program else task.get_name()
        return None if innermost is None else find_blockage(frames_of(innermost), name)

    return look


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


END_EVERY_S = 1.0
"""The time between two tries to end what blocks the loop beyond the limit."""

MAX_RAISED = 3
"""The number of errors raised in a workflow before the process is ended: it may catch them."""

MAX_WAIT_S = 4.0
HEARTBEAT_GRACE_S = 10.0
"""The time beyond the limit that the watchdog has to end what blocks, before C ends the process for it."""


@dataclass(slots=True)
class _Ping:
    sent_s: float
    has_looked: bool = False
    is_blocked: bool = False
    num_late: int = 0  # checks without an answer: a process that was stopped for an hour has made none
    next_end_s: float = 0.0
    num_ended: int = 0  # tries to end what blocks


class Watchdog:
    """Watches one loop.

    ::

        with Watchdog.of_this_loop(warn_s=1.0, limit_s=300.0) as watchdog:
            ...
        watchdog.blocked_s

    The limit holds in a process's main thread, and not under a debugger.
    """

    def __init__(
        self,
        *,
        warn_s: float,
        ping: Callable[[Callable[[], None]], object],
        look: Callable[..., Blockage | None],
        now: Callable[[], float] = time.monotonic,
        limit_s: float | None = None,
    ) -> None:
        self.blocked_s = 0.0
        self._warn_s = warn_s
        self._look_every_s = min(warn_s, MAX_WAIT_S) / LOOKS_A_WARNING
        self._limit_s = limit_s
        self._send = ping
        self._look = look
        self._now = now
        self._ping: _Ping | None = None
        self._warned: set[Frame] = set()
        self._handlers: dict[signal.Signals, Any] = {}  # those of the program
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @classmethod
    def of_this_loop(cls, *, warn_s: float, limit_s: float) -> Self:
        """Make a watchdog for the running loop. Call it on the loop's thread."""
        return cls(
            warn_s=warn_s,
            ping=asyncio.get_running_loop().call_soon_threadsafe,
            look=watch_this_loop(),
            now=clock_of_thread(threading.get_native_id()),
            limit_s=limit_s if threading.current_thread() is threading.main_thread() and not sys.gettrace() else None,
        )

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            self._handlers = {
                number: signal.signal(number, handle)
                for number, handle in ((signal.SIGURG, self._raise_in_frame), (signal.SIGTSTP, _stop))
            }
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._limit_s is not None:
            faulthandler.cancel_dump_traceback_later()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Send a ping, or look what keeps the last one from its answer. The thread calls it."""
        ping = self._ping
        if ping is None:
            self._ping = ping = _Ping(sent_s=self._now())
            self._send(lambda: self._answer(ping))
            return
        ping.num_late += 1
        seconds = self._now() - ping.sent_s
        if seconds >= self._warn_s and not ping.has_looked:
            ping.has_looked = True
            blockage = self._look()
            if blockage is not None:
                ping.is_blocked = True
                if blockage.place not in self._warned:
                    self._warned.add(blockage.place)
                    logger.warning("%s", blockage.describe(seconds))
        blocked_s = min(seconds, ping.num_late * self._look_every_s)
        if self._limit_s is not None and blocked_s >= max(self._limit_s, ping.next_end_s):
            ping.next_end_s = blocked_s + END_EVERY_S
            self._end(ping, blocked_s)

    def _end(self, ping: _Ping, blocked_s: float) -> None:
        """Raise an error where a workflow blocks the loop's thread; end the process where that has not helped."""
        blockage = self._look()
        if blockage is None or not blockage.is_workflows:
            return
        ping.num_ended += 1
        if ping.num_ended <= MAX_RAISED:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            return
        logger.error(
            "%s. No error raised there has ended it, so this process ends: a worker is started again; a run goes on "
            "from its last checkpoint with --resume, and with rollout.workers such a workflow costs a worker only",
            blockage.describe(blocked_s),
        )
        os._exit(1)

    def _raise_in_frame(self, _number: int, frame: FrameType | None) -> None:
        """Handle the signal of `_end`, in the frame at which the loop's thread is."""
        ping, blockage = self._ping, self._look(frame)
        if ping is not None and ping.num_ended and blockage is not None and blockage.is_workflows:
            raise LoopBlocked(f"{blockage.describe(self._now() - ping.sent_s)}, or rollout.workers")

    def _answer(self, ping: _Ping) -> None:
        """Answer a ping, on the loop. Only delays whose place was seen count: a busy machine delays idle loops too."""
        if ping.is_blocked:
            self.blocked_s += self._now() - ping.sent_s
        self._ping = None

    def _watch(self) -> None:
        while not self._stopped.wait(self._look_every_s):
            self.check()
            self._beat()

    def _beat(self) -> None:
        """Put off the end of the process, which comes, with its stacks, once the watchdog's thread cannot run."""
        if self._limit_s is not None:
            faulthandler.dump_traceback_later(self._limit_s + HEARTBEAT_GRACE_S, exit=True, file=2)


def _stop(_number: int, _frame: object) -> None:
    """Stop this process, as Ctrl-Z asks, without the heartbeat, which would end it when it is continued."""
    faulthandler.cancel_dump_traceback_later()
    os.kill(os.getpid(), signal.SIGSTOP)
