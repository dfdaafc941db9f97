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
import warnings
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from areal_agent.errors import SandboxError
from sandboxes.base import Capabilities, Provider
from sandboxes.cell import Cell
from sandboxes.containers.provider import DockerProvider
from sandboxes.jail import JailProvider
from sandboxes.sandbox import SANDBOX_FAILED, Sandbox
from sandboxes.spec import CellSpec, Isolation, Limits, SandboxSpec, Status
from sandboxes.subprocess import SubprocessProvider

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
OnSuspicion = Literal["keep", "zero", "drop"]
Backend = Literal["auto", "embedded", "docker", "jail", "subprocess", "bubblewrap", "namespaces"]
"""`auto` is the strongest backend that works, `embedded` the strongest that needs no separate engine. `bubblewrap` and
`namespaces` are old names of `jail`.
"""
ISOLATION_OF = {"docker": Isolation.CONTAINER, "jail": Isolation.NAMESPACES, "subprocess": Isolation.PROCESS}
BACKENDS = ("auto", "embedded", *ISOLATION_OF)
OLD_NAMES = {"bubblewrap": "jail", "namespaces": "jail"}
DEFAULTS = Limits()
DESCRIPTORS_A_PROGRAM = 4
DESCRIPTORS_OF_HOST = 128
MAX_STARTING = 4
"""The most cells that are started at once; more would only slow each other down."""
MAX_FAILED_SHARE = 0.01
"""The share of programs that sandboxes may fail before a pool warns."""
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
    on_suspicion: OnSuspicion = "zero",
) -> AsyncGenerator["Pool", None]:
    """Open a pool; leaving it kills every program and removes every file.

    `auto` takes the strongest backend that works here and logs which. SandboxError if the backend isolates less than
    `min_isolation` or does not work here; with None, `auto` and `embedded` never fall back on plain processes.
    `max_concurrent` bounds the programs that run at once, `max_idle` the sandboxes that stand ready. `on_suspicion` is
    kept for the workflow: a task folder's verdict takes it (`TaskVerdict.reward_for`).
    """
    check_max_concurrent(max_concurrent)
    limits = Limits(wall_s=wall_s, memory_bytes=memory_bytes, output_bytes=output_bytes)
    least = None if min_isolation is None else Isolation(min_isolation)
    pool = Pool(await start_provider(backend, least), limits, max_concurrent, max_idle)
    pool.on_suspicion = on_suspicion
    try:
        yield pool
    finally:
        await pool.close()
        log_counts(pool.counts)


def log_counts(counts: Counter[str]) -> None:
    """Log how a pool's programs ended: a warning if sandboxes failed more than `MAX_FAILED_SHARE` of them."""
    total, num_ok, num_failed = counts.total(), counts[Status.OK], counts[SANDBOX_FAILED]
    logger.log(
        logging.WARNING if num_failed > MAX_FAILED_SHARE * total else logging.INFO,
        "of %d programs %d succeeded, %d failed by themselves, and %d because of their sandbox",
        *(total, num_ok, total - num_ok - num_failed, num_failed),
    )


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
    """Hands out sandboxes of a provider, which it owns. `limits` apply to a spec that names none.

    `counts` has the programs that ran to their end by `Status`, and by `SANDBOX_FAILED` those that a sandbox failed.
    """

    def __init__(self, provider: Provider, limits: Limits, max_concurrent: int, max_idle: int = 8) -> None:
        self._provider = provider
        self._limits = limits
        self._slots = asyncio.Semaphore(max_concurrent)  # wakes its waiters in order
        self._stock = Stock(provider, max_idle=max_idle)
        self.counts: Counter[str] = Counter()
        self.on_suspicion: OnSuspicion = "zero"

    def capabilities(self) -> Capabilities:
        return self._provider.capabilities()

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec | None = None) -> AsyncGenerator[Sandbox, None]:
        """Yield a fresh sandbox, closed on leaving. SandboxError when the backend cannot give what `spec` asks for."""
        spec = spec or SandboxSpec()
        self.check(spec)
        sandbox = Sandbox(self._stock.take, spec, self._limits, self._slots, self.counts)
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
    """The cells of one kind that are ready, or the callers that wait for one; there are never both."""

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.target = 0  # number of cells to keep ready
        self.is_asked_again = False
        self.starts: set[asyncio.Task[Cell]] = set()
        self.ready: dict[Cell, asyncio.TimerHandle] = {}  # with the timer that closes it; the oldest first
        self.waiters: deque[asyncio.Future[Cell]] = deque()

    @property
    def num_spare(self) -> int:
        """The number of cells that are ready, or are starting with nobody waiting for them."""
        return len(self.ready) + max(0, len(self.starts) - len(self.waiters))


class Stock:
    """The started cells of a provider. End it with `aclose`; cells that were handed out belong to their callers."""

    def __init__(
        self, provider: Provider, *, max_idle: int, idle_s: float = 60.0, refill_pause_s: float = REFILL_PAUSE_S
    ) -> None:
        self.shelves: dict[CellSpec, Shelf] = {}
        self._provider = provider
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._refill_pause_s = refill_pause_s
        self._loop = asyncio.get_running_loop()
        self._starts = asyncio.Semaphore(MAX_STARTING)
        self._tasks: set[asyncio.Task[Any]] = set()  # starts and closings of cells
        self._is_closed = False

    async def take(self, spec: CellSpec) -> Cell:
        """Return a cell that nobody has had before. One of the stock is asked: it may have died a moment ago."""
        while True:
            self.check_open()
            shelf = self.shelves.setdefault(spec, Shelf(spec))
            waiter: asyncio.Future[Cell] = self._loop.create_future()
            if is_stock := bool(shelf.ready):
                cell = next(iter(shelf.ready))
                shelf.ready.pop(cell).cancel()
                waiter.set_result(cell)
            else:
                shelf.target = min(shelf.target + shelf.is_asked_again, self._max_idle)
                shelf.is_asked_again = True
                shelf.waiters.append(waiter)
                self._refill(shelf)
            try:
                cell = await asyncio.shield(waiter)
                is_living = not is_stock or await cell.answers()
            except BaseException:  # a caller who goes leaves the cell, now or when it comes, to others
                waiter.add_done_callback(partial(self._shelve, shelf))
                raise
            if is_living:
                self._loop.call_later(self._refill_pause_s, self._refill, shelf)
                return cell
            self._own(cell.close())

    async def warm(self, spec: CellSpec, num_cells: int) -> None:
        """Keep `num_cells` ready from now on, and wait until they are; a failure to start one is raised."""
        for _ in range(2):  # the second time replaces cells that others began, and that failed or were handed out
            self.check_open()
            shelf = self.shelves.setdefault(spec, Shelf(spec))
            shelf.target = max(shelf.target, min(num_cells, self._max_idle))
            others = shelf.starts.copy()
            self._refill(shelf)
            if starts := shelf.starts.copy():
                await asyncio.wait(starts)
            self.check_open()  # closing cancels what was being started
            for start in starts - others:
                start.result()
            if not others:
                return

    def check_open(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed; open another")

    async def aclose(self) -> None:
        """Close the cells that were not handed out."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for shelf in self.shelves.values():
            for timer in shelf.ready.values():
                timer.cancel()
            for waiter in shelf.waiters:
                waiter.set_exception(SandboxError("the sandbox pool was closed"))
            await asyncio.gather(*(cell.close() for cell in shelf.ready))
        self.shelves.clear()

    def _refill(self, shelf: Shelf) -> None:
        """Start what is missing: a cell for each waiter, and those to keep ready as far as there is room."""
        if self._is_closed:
            return
        num_spare_elsewhere = sum(other.num_spare for other in self.shelves.values() if other is not shelf)
        num_spare = min(shelf.target, self._max_idle - num_spare_elsewhere) - len(shelf.ready)
        for _ in range(len(shelf.waiters) + max(0, num_spare) - len(shelf.starts)):
            start = self._own(self._start(shelf.spec))
            shelf.starts.add(start)
            start.add_done_callback(partial(self._on_started, shelf))

    async def _start(self, spec: CellSpec) -> Cell:
        async with self._starts:
            return await self._provider.create(spec)

    def _on_started(self, shelf: Shelf, start: asyncio.Task[Cell]) -> None:
        """Hand a cell on. A failure is the longest waiter's, and fewer are kept ready, so that failing starts cease."""
        shelf.starts.discard(start)
        self._shelve(shelf, start)
        if not start.cancelled() and (error := start.exception()):
            if shelf.waiters:
                shelf.waiters.popleft().set_exception(error)
            else:
                logger.warning("a sandbox could not be started ahead of its use: %s", error)
            self._keep_one_fewer(shelf)

    def _shelve(self, shelf: Shelf, outcome: asyncio.Future[Cell]) -> None:
        """Give a cell, if there is one, to the longest waiter or, without one, put it on the shelf."""
        if outcome.cancelled() or outcome.exception():
            return
        cell = outcome.result()
        if shelf.waiters:
            shelf.waiters.popleft().set_result(cell)
        elif sum(len(other.ready) for other in self.shelves.values()) >= self._max_idle or self._is_closed:
            self._own(cell.close())
        else:
            shelf.ready[cell] = self._loop.call_later(self._idle_s, self._expire, shelf, cell)

    def _expire(self, shelf: Shelf, cell: Cell) -> None:
        """Close a cell that nobody asked for."""
        del shelf.ready[cell]
        self._own(cell.close())
        self._keep_one_fewer(shelf)

    def _keep_one_fewer(self, shelf: Shelf) -> None:
        shelf.target = max(0, shelf.target - 1)
        if not (shelf.target or shelf.starts or shelf.ready or shelf.waiters):
            self.shelves.pop(shelf.spec, None)

    def _own(self, work: Coroutine[Any, Any, Answer]) -> asyncio.Task[Answer]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_Start = Callable[[], Awaitable[Provider]]
_CONTAINERS: tuple[Isolation, _Start] = (Isolation.CONTAINER, lambda: DockerProvider.start(needs_default_image=True))
_JAILS: tuple[Isolation, _Start] = (Isolation.NAMESPACES, JailProvider.start)


async def start_provider(backend: Backend, min_isolation: Isolation | None) -> Provider:
    """Start the provider of a backend; raise SandboxError if it isolates less than `min_isolation`."""
    if backend in OLD_NAMES:
        warnings.warn(
            f"sandbox backend {backend!r} is now called {OLD_NAMES[backend]!r}; the next release drops the old name",
            FutureWarning,
            stacklevel=4,  # the caller of `open_pool`
        )
    name = OLD_NAMES.get(backend, backend)
    if name not in BACKENDS:
        raise ValueError(f"sandbox backend {name!r} does not exist; there are {', '.join(BACKENDS)}")
    if name in ("auto", "embedded"):
        isolating = (_CONTAINERS, _JAILS) if name == "auto" else (_JAILS,)
        return await start_strongest(name, isolating, min_isolation)
    refuse_less(name, ISOLATION_OF[name], min_isolation or Isolation.NONE)
    if name == "docker":
        return await DockerProvider.start()
    return await (JailProvider.start() if name == "jail" else SubprocessProvider.start())


async def start_strongest(
    backend: str, isolating: Sequence[tuple[Isolation, _Start]], min_isolation: Isolation | None
) -> Provider:
    """Start the first of these providers, strongest first, that works.

    If none does, plain processes are used only if `min_isolation` allows them; None does not.
    """
    least = min_isolation or Isolation.NAMESPACES
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
    return f"strongest that works here ({'; '.join(reasons)})" if reasons else "strongest"
