"""A pool: sandboxes on demand, a bound on the programs that run at once, and the choice of a backend.

A sandbox costs nothing until it is used, so an agent may hold one while it thinks. The pool bounds the programs that
run at once (first come, first served) and the cells that stand ready or are being started.

`Stock` keeps started cells, each of which is handed out once. Demand sets its size: a request that finds no cell of its
kind ready raises the number kept ready by one, up to a bound (the first request of a kind does not: there may be no
second), and a cell that nobody asks for within `idle_s` lowers it.
"""

import asyncio
import logging
import resource
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities, Cell, Provider
from sandboxes.bubblewrap import BubblewrapProvider
from sandboxes.containers.provider import DockerProvider
from sandboxes.jail import Walls
from sandboxes.sandbox import Sandbox
from sandboxes.spec import CellSpec, Isolation, Limits, SandboxSpec
from sandboxes.subprocess import SubprocessProvider

logger = logging.getLogger(__name__)
Backend = Literal["auto", "embedded", "docker", "bubblewrap", "namespaces", "subprocess"]
"""`auto` is the strongest backend that works, `embedded` the strongest that needs no separate engine. `bubblewrap` uses
system calls where bubblewrap is missing; `namespaces` always does.
"""
ISOLATION_OF: dict[str, Isolation] = {
    "docker": Isolation.CONTAINER,
    "bubblewrap": Isolation.NAMESPACES,
    "namespaces": Isolation.NAMESPACES,
    "subprocess": Isolation.PROCESS,
}
BACKENDS = ("auto", "embedded", *ISOLATION_OF)
DEFAULTS = Limits()
DESCRIPTORS_A_PROGRAM = 4
DESCRIPTORS_OF_HOST = 128
MAX_STARTING = 4
"""The most cells that are started at once; more would only slow each other down."""
REFILL_PAUSE_S = 0.05
"""The pause before a refill: a caller that was just handed a cell is about to use it, and the refill can wait."""


@asynccontextmanager
async def open_pool(
    *,
    backend: Backend,
    min_isolation: Isolation | str | None = None,
    wall_s: float = DEFAULTS.wall_s,
    memory_bytes: int = DEFAULTS.memory_bytes,
    output_bytes: int = DEFAULTS.output_bytes,
    max_concurrent: int = 16,
    max_idle: int = 8,
) -> AsyncGenerator["Pool", None]:
    """Open a pool; leaving it kills every program and removes every file.

    `auto` takes the strongest backend that works here and logs which. SandboxError if the backend isolates less than
    `min_isolation` or does not work here; with None, `auto` and `embedded` never fall back on plain processes.
    `max_concurrent` bounds the programs that run at once, `max_idle` the sandboxes that stand ready.
    """
    check_max_concurrent(max_concurrent)
    limits = Limits(wall_s=wall_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    least = None if min_isolation is None else Isolation(min_isolation)
    pool = Pool(await start_provider(backend, least), limits, max_concurrent, max_idle)
    try:
        yield pool
    finally:
        await pool.close()


def check_max_concurrent(max_concurrent: int) -> None:
    """Raise ValueError if this process may not open enough files for so many programs."""
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent is {max_concurrent}; give at least 1")
    available, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_concurrent * DESCRIPTORS_A_PROGRAM + DESCRIPTORS_OF_HOST
    if available != resource.RLIM_INFINITY and needed > available:
        raise ValueError(
            f"max_concurrent={max_concurrent} needs {needed} open files, but this process may have only {available}; "
            "lower it, or raise the limit (ulimit -n)"
        )


class Pool:
    """Hands out sandboxes of a provider, which it owns. `limits` apply to a spec that names none."""

    def __init__(self, provider: Provider, limits: Limits, max_concurrent: int, max_idle: int = 8) -> None:
        self._provider = provider
        self._limits = limits
        self._slots = asyncio.Semaphore(max_concurrent)  # wakes its waiters in order
        self._stock = Stock(provider, max_idle=max_idle)

    def capabilities(self) -> Capabilities:
        return self._provider.capabilities()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox, None]:
        """Yield a fresh sandbox, closed on leaving. SandboxError when the backend cannot give what `spec` asks for."""
        spec = spec or SandboxSpec()
        self.check(spec)
        sandbox = Sandbox(self._stock.take, spec, self._limits, self._slots)
        try:
            await sandbox.prepare()
            yield sandbox
        finally:
            await sandbox.close()

    async def warm(self, spec: SandboxSpec | None = None, *, num_cells: int) -> None:
        """Start `num_cells` cells for a spec before the first is asked for, as far as `max_idle` allows."""
        spec = spec or SandboxSpec()
        self.check(spec)
        await self._stock.warm(spec.cell(self._limits), num_cells)

    def check(self, spec: SandboxSpec) -> None:
        """Raise SandboxError when the backend cannot give what `spec` asks for."""
        capabilities = self.capabilities()
        refuse_less(capabilities.backend, capabilities.isolation, spec.min_isolation)
        self._stock.check_open()
        self._provider.check(spec.cell(self._limits))

    async def reap(self) -> int:
        """Remove what dead owners left on this machine, and return the number of things removed."""
        return await self._provider.reap()

    async def close(self) -> None:
        """Close every sandbox. Harmless when the pool is closed already."""
        await self._stock.aclose()
        await self._provider.close()


class Shelf:
    """The cells of one kind, and the callers that wait for one."""

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.target = 0  # number of cells to keep ready
        self.is_asked_again = False
        self.num_starting = 0
        self.starts: set[asyncio.Task[None]] = set()  # the starting cells that no call of `warm` awaits
        self.refill: asyncio.TimerHandle | None = None
        self.ready: deque[Cell] = deque()
        self.waiters: deque[asyncio.Future[Cell]] = deque()

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.done() for waiter in self.waiters)

    @property
    def num_spare(self) -> int:
        """The number of cells that are ready, or are starting with nobody waiting for them."""
        return len(self.ready) + max(0, self.num_starting - self.num_waiting)

    @property
    def is_unused(self) -> bool:
        return not (self.target or self.num_starting or self.ready or self.num_waiting)


class Stock:
    """The started cells of a provider. End it with `aclose`; cells that were handed out belong to their callers."""

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
        """Return a cell that nobody has had before."""
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
        """Keep `num_cells` ready from now on, and wait until they are; a failure to start one is raised."""
        others = await self._start_missing(spec, num_cells)
        if others:
            await asyncio.wait(others)
            await self._start_missing(spec, num_cells)  # replaces those that failed or were handed out

    async def _start_missing(self, spec: CellSpec, num_cells: int) -> set[asyncio.Task[None]]:
        """Start the cells that are missing, and return the starts that were under way before."""
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
        """Close the cells that were not handed out."""
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
                self._shelve(shelf, waiter.result())  # the cell came just as the caller was cancelled
            raise

    def _refill_soon(self, shelf: Shelf) -> None:
        if shelf.refill is None:
            shelf.refill = self._loop.call_later(self._refill_pause_s, self._refill, shelf)

    def _refill(self, shelf: Shelf) -> None:
        """Start what is missing: a cell for each waiter, and those to keep ready as far as there is room."""
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
        except Exception as error:  # the boundary: the waiter gets the error
            self._fail_one(shelf, error)

    async def _start_one(self, shelf: Shelf) -> None:
        """Start one cell; `num_starting` counts it already."""
        try:
            async with self._starts:
                cell = await self._provider.create(shelf.spec)
        finally:
            shelf.num_starting -= 1
        self._shelve(shelf, cell)

    def _fail_one(self, shelf: Shelf, error: Exception) -> None:
        """Pass the error to the longest waiter, and keep one cell fewer ready, so that failing starts cease."""
        if (waiter := self._next_waiter(shelf)) is not None:
            waiter.set_exception(error)
        else:
            logger.warning("a sandbox could not be started ahead of its use: %s", error)
        shelf.target = max(0, shelf.target - 1)
        self._forget_unused(shelf)

    def _shelve(self, shelf: Shelf, cell: Cell) -> None:
        """Give a cell to the longest waiter or, without one, put it on the shelf."""
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
        """Close a cell that nobody asked for."""
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


_Start = Callable[[], Awaitable[Provider]]
_CONTAINERS: tuple[Isolation, _Start] = (Isolation.CONTAINER, lambda: DockerProvider.start(needs_default_image=True))
_JAILS: tuple[Isolation, _Start] = (Isolation.NAMESPACES, BubblewrapProvider.start)


async def start_provider(backend: Backend, min_isolation: Isolation | None) -> Provider:
    """Start the provider of a backend; raise SandboxError if it isolates less than `min_isolation`."""
    if backend not in BACKENDS:
        raise ValueError(f"sandbox backend {backend!r} does not exist; there are {', '.join(BACKENDS)}")
    if backend in ("auto", "embedded"):
        isolating = (_CONTAINERS, _JAILS) if backend == "auto" else (_JAILS,)
        return await start_strongest(backend, isolating, min_isolation)
    refuse_less(backend, ISOLATION_OF[backend], min_isolation or Isolation.NONE)
    if backend == "docker":
        return await DockerProvider.start()
    if backend == "subprocess":
        return await SubprocessProvider.start()
    return await BubblewrapProvider.start((Walls.NAMESPACES,) if backend == "namespaces" else tuple(Walls))


async def start_strongest(
    backend: str, isolating: Sequence[tuple[Isolation, _Start]], min_isolation: Isolation | None
) -> Provider:
    """Start the first of these providers, strongest first, that works.

    If none does, plain processes are used only if `min_isolation` allows them; None does not.
    """
    least = min_isolation or Isolation.NAMESPACES
    refuse_less("strongest", isolating[0][0], least)
    reasons: list[str] = []
    for isolation, start in isolating:
        refuse_less(_strongest_here(reasons), isolation, least)
        try:
            return await start()
        except SandboxError as error:
            reasons.append(str(error))
            logger.info("sandbox backend: not %s, for %s", isolation.value, error)
    if min_isolation is None:
        raise SandboxError(
            f"no sandbox that isolates works here ({'; '.join(reasons)}), and the {backend} backend does not run "
            "programs without isolation unless told to; see python -m sandboxes doctor, or set min_isolation='none' "
            "(in the config of a run sandbox.min_isolation=none): programs are then limited, but not isolated"
        )
    refuse_less(_strongest_here(reasons), Isolation.PROCESS, least)
    logger.warning("sandbox backend: subprocess, for %s", "; ".join(reasons))
    return await SubprocessProvider.start()


def refuse_less(backend: str, isolation: Isolation, min_isolation: Isolation) -> None:
    """Raise SandboxError when a backend isolates less than is asked for."""
    if not isolation.covers(min_isolation):
        raise SandboxError(
            f"min_isolation is {min_isolation.value!r}, but the {backend} backend gives only {isolation.value!r}; "
            f"use a stronger backend, or ask for less (min_isolation={isolation.value!r})"
        )


def _strongest_here(reasons: Sequence[str]) -> str:
    return f"strongest that works here ({'; '.join(reasons)})"
