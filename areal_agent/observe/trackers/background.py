"""Trackers beside a run: a thread each, so that none can hold up the run or another. It knows no tracker by name.

Rows wait in a queue for the tracker's thread, which opens the tracker, too. A tracker that fails is told of in one
warning; one that hangs loses rows once its queue is full, and at the end is left behind after a while.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from areal_agent.observe.trackers.tracker import Tracker

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Rows that wait for a tracker that does not get on."""
CLOSE_S = 60.0
"""How long the end of a run waits for its trackers, all together."""


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    numbers: Mapping[str, float]


class BackgroundTracker:
    """One tracker and its thread, a daemon: a process may end without it."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._make = make
        self._entries: queue.Queue[_Entry | None] = queue.Queue(MAX_WAITING)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Returns at once."""
        if not self._thread.is_alive():
            return
        try:
            self._entries.put_nowait(_Entry(step, numbers))
        except queue.Full:
            self._warn(f"does not get on; rows are left out from step {step} on")

    def close(self, deadline: float) -> None:
        """Wait until everything is with the tracker, at most until `deadline` (monotonic)."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._entries.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn("does not end; it is left behind")

    def _run(self) -> None:
        try:
            tracker = self._make()
        except Exception as error:  # the boundary: a tracker may fail in any way, and none of them stops a run
            self._warn("cannot be opened", error)
            return
        while (entry := self._entries.get()) is not None:
            self._try(lambda one=entry: tracker.log(one.step, one.numbers))
        self._try(tracker.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the boundary, as above
            self._warn("failed; what it shows is incomplete", error)

    def _warn(self, what: str, error: Exception | None = None) -> None:
        """Once: a tracker that failed may fail at every step."""
        if not self._has_warned:
            self._has_warned = True
            why = "" if error is None else f": {type(error).__name__}: {' '.join(str(error).split())}"
            logger.warning("the tracker %s %s%s; metrics.jsonl has everything", self._name, what, why)


class Trackers:
    """All trackers of a run. End it with `aclose`."""

    def __init__(self, trackers: Sequence[BackgroundTracker] = ()) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, numbers)

    async def aclose(self) -> None:
        """Wait for all of them, for `CLOSE_S` at the most."""
        deadline = time.monotonic() + CLOSE_S
        await asyncio.gather(*(asyncio.to_thread(tracker.close, deadline) for tracker in self._trackers))
