"""Cells that are started before they are asked for, handed out once. It knows no backend.

Demand sizes it: who finds none ready raises the number that is kept ready of that kind by one, up to the stock's bound
(the first who asks does not: there may be no second); one that was not asked for within `idle_s` lowers it. Whoever
waits is served in the order of asking.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

from areal_agent.errors import SandboxError
from sandboxes.base import Cell, Provider
from sandboxes.spec import CellSpec

logger = logging.getLogger(__name__)

MAX_STARTING = 4
"""Cells that are started at once: more would only slow each other down."""
REFILL_PAUSE_S = 0.05
"""Who was handed a cell is about to use it. The start of the next costs more than that, and is in less of a hurry."""


class Shelf:
    """The cells of one kind."""

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.target = 0  # how many to keep ready
        self.is_asked_again = False
        self.num_starting = 0
        self.starts: set[asyncio.Task[None]] = set()  # those of them that nobody here waits for
        self.refill: asyncio.TimerHandle | None = None
        self.ready: deque[Cell] = deque()
        self.waiters: deque[asyncio.Future[Cell]] = deque()

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.done() for waiter in self.waiters)

    @property
    def num_spare(self) -> int:
        """Ready now, or soon and for nobody yet."""
        return len(self.ready) + max(0, self.num_starting - self.num_waiting)

    @property
    def is_unused(self) -> bool:
        return not (self.target or self.num_starting or self.ready or self.num_waiting)


class Stock:
    """Cells of a provider. End it with `aclose`; what was handed out is not its any more."""

    def __init__(
        self, provider: Provider, *, max_idle: int, idle_s: float = 60.0, refill_pause_s: float = REFILL_PAUSE_S
    ) -> None:
        self._provider = provider
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._refill_pause_s = refill_pause_s
        self._loop = asyncio.get_running_loop()
        self._shelves: dict[CellSpec, Shelf] = {}
        self._starts = asyncio.Semaphore(MAX_STARTING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[Cell, asyncio.TimerHandle] = {}
        self._is_closed = False

    @property
    def shelves(self) -> list[Shelf]:
        return list(self._shelves.values())

    @property
    def num_ready(self) -> int:
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    async def take(self, spec: CellSpec) -> Cell:
        """A cell that nobody has had."""
        self.check_open()
        shelf = self._shelves.setdefault(spec, Shelf(spec))
        cell = self._pop_living(shelf)
        if cell is None:
            if shelf.is_asked_again:
                shelf.target = min(shelf.target + 1, self._max_idle)
            shelf.is_asked_again = True
            cell = await self._wait(shelf)
        self._refill_soon(shelf)
        return cell

    async def warm(self, spec: CellSpec, num_cells: int) -> None:
        """Keep so many ready from now on, and wait until they are; a failure to start one is raised."""
        others = await self._start_missing(spec, num_cells)
        if others:
            await asyncio.wait(others)
            await self._start_missing(spec, num_cells)  # in the place of those that failed, or were handed out

    async def _start_missing(self, spec: CellSpec, num_cells: int) -> set[asyncio.Task[None]]:
        """Returns the starts that were under way before."""
        self.check_open()
        shelf = self._shelves.setdefault(spec, Shelf(spec))
        shelf.target = max(shelf.target, min(num_cells, self._max_idle))
        num_missing = max(0, shelf.target - shelf.num_spare)
        shelf.num_starting += num_missing
        others = set(shelf.starts)
        starts = [self._start_one(shelf) for _ in range(num_missing)]
        for outcome in await asyncio.gather(*starts, return_exceptions=True):
            if outcome is not None:
                raise outcome
        return others

    def check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed; open another")

    async def aclose(self) -> None:
        """Close what was not handed out."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for timer in self._timers.values():
            timer.cancel()
        for shelf in self._shelves.values():
            if shelf.refill is not None:
                shelf.refill.cancel()
            for waiter in shelf.waiters:
                if not waiter.done():
                    waiter.set_exception(SandboxError("the sandbox pool was closed"))
            await asyncio.gather(*(cell.close() for cell in shelf.ready))
        self._shelves.clear()

    def _pop_living(self, shelf: Shelf) -> Cell | None:
        while shelf.ready:
            cell = shelf.ready.popleft()
            self._timers.pop(cell).cancel()
            if cell.is_alive:
                return cell
            self._own(cell.close())
        return None

    async def _wait(self, shelf: Shelf) -> Cell:
        waiter: asyncio.Future[Cell] = self._loop.create_future()
        shelf.waiters.append(waiter)
        self._refill(shelf)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._shelve(shelf, waiter.result())  # it came in the moment of the cancellation
            raise

    def _refill_soon(self, shelf: Shelf) -> None:
        if shelf.refill is None:
            shelf.refill = self._loop.call_later(self._refill_pause_s, self._refill, shelf)

    def _refill(self, shelf: Shelf) -> None:
        """Start what is missing: one for each who waits, and what is to be ready, as far as there is room."""
        if shelf.refill is not None:
            shelf.refill.cancel()
            shelf.refill = None
        if self._is_closed:
            return
        num_spare_elsewhere = sum(other.num_spare for other in self._shelves.values() if other is not shelf)
        num_spare = min(shelf.target, self._max_idle - num_spare_elsewhere) - len(shelf.ready)
        for _ in range(shelf.num_waiting + max(0, num_spare) - shelf.num_starting):
            shelf.num_starting += 1
            start = self._own(self._start(shelf))
            shelf.starts.add(start)
            start.add_done_callback(shelf.starts.discard)

    async def _start(self, shelf: Shelf) -> None:
        try:
            await self._start_one(shelf)
        except Exception as error:  # the boundary: whoever waits is told
            self._fail_one(shelf, error)

    async def _start_one(self, shelf: Shelf) -> None:
        """One of `num_starting`, which counts it from before."""
        try:
            async with self._starts:
                cell = await self._provider.create(shelf.spec)
        finally:
            shelf.num_starting -= 1
        self._shelve(shelf, cell)

    def _fail_one(self, shelf: Shelf, error: Exception) -> None:
        """Who waits longest learns why; with nobody waiting, less is kept ready, so that nothing is tried for ever."""
        if (waiter := self._next_waiter(shelf)) is not None:
            waiter.set_exception(error)
        else:
            logger.warning("a sandbox could not be started ahead of its use: %s", error)
        shelf.target = max(0, shelf.target - 1)
        self._forget_unused(shelf)

    def _shelve(self, shelf: Shelf, cell: Cell) -> None:
        """To who waits longest, or to the shelf."""
        if (waiter := self._next_waiter(shelf)) is not None:
            waiter.set_result(cell)
        elif self._is_closed:
            self._own(cell.close())
        else:
            shelf.ready.append(cell)
            self._timers[cell] = self._loop.call_later(self._idle_s, self._expire, shelf, cell)

    def _next_waiter(self, shelf: Shelf) -> asyncio.Future[Cell] | None:
        while shelf.waiters:
            if not (waiter := shelf.waiters.popleft()).done():
                return waiter
        return None

    def _expire(self, shelf: Shelf, cell: Cell) -> None:
        """Nobody asked for it."""
        del self._timers[cell]
        shelf.ready.remove(cell)
        shelf.target = max(0, shelf.target - 1)
        self._own(cell.close())
        self._forget_unused(shelf)

    def _forget_unused(self, shelf: Shelf) -> None:
        if shelf.is_unused:
            self._shelves.pop(shelf.spec, None)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
