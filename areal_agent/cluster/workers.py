"""The rollout workers of a run: `WorkerPool` spreads rollouts over them and keeps them alive.

    run(spec) ──▶ the worker with the fewest rollouts ──▶ ended
       ▲                        │ its process died: its open sessions end as orphans, it is started again
       └── the same rollout, under a new session id if the old one is an orphan

A `Seat` is the place of one worker, held by one process after the other:

    start ─▶ alive ─▶ (its process dies) ─▶ bury: what it left open is an orphan ─▶ start ...

The pool owns a keeper task per worker, which waits for its death. Three deaths of one worker within a minute of service
end the run.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from areal_agent.cluster.hosts import LOCAL, Hosts, Process
from areal_agent.cluster.local import start_worker
from areal_agent.cluster.servers import MAX_DEATHS, WITHIN_S, DeathCount
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.engine.fleet.member import FleetView
from areal_agent.errors import ArealAgentError, LedgerError, ProcessDied, WorkerError
from areal_agent.gateway.metrics import Counters, GatewayStats, add_up
from areal_agent.ledger.ledger import Ledger
from areal_agent.observe.clock import BusyClock, ClockShift, SpanUnion
from areal_agent.rollout import watchdog
from areal_agent.rollout.local import EndedRollout, RolloutStats
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.worker_client import Counted, WorkerClient, WorkerGone, WorkerSettings
from areal_agent.types import Status

logger = logging.getLogger(__name__)


STATS_WAIT_S = 1.0
"""The longest wait for a worker's counters; a blocked worker answers when it can."""

PULSE_S = 5.0
"""The period at which a worker has to answer; one that is silent beyond the limit on blocking, and a grace, is killed.
"""

SILENCE_GRACE_S = 30.0
"""The time that a worker has to end by itself what blocks it, or itself."""


class Orphaned(Exception):
    """The worker died under a rollout. `sessions` are all that it left open, which are orphans now."""

    def __init__(self, sessions: frozenset[str]) -> None:
        super().__init__(f"{len(sessions)} sessions")
        self.sessions = sessions


class Life:
    """One process of a worker, from its start to its burial."""

    def __init__(self, process: Process, client: WorkerClient) -> None:
        self.process = process
        self.client = client
        self.orphans: asyncio.Future[frozenset[str]] = asyncio.get_running_loop().create_future()
        self.gateway: GatewayStats = Counters().snapshot(num_open_sessions=0)
        self.loop_blocked_s = 0.0
        self.clock = ClockShift()


class Seat:
    """The place of one worker. `engine_busy` unites the busy time of all workers' requests."""

    def __init__(
        self,
        settings: WorkerSettings,
        logs: Path,
        engine_busy: SpanUnion,
        on_warning: Callable[[str], None],
        hosts: Hosts = LOCAL,
    ) -> None:
        self.settings = settings
        self.name = f"worker {settings.number}"
        self.load = 0  # rollouts under way
        self.deaths = DeathCount()
        self._logs = logs
        self._hosts = hosts
        self._engine_busy = engine_busy
        self._on_warning = on_warning
        self._engines: FleetView | None = None  # the states of the servers sent last
        self._stack = AsyncExitStack()
        self._life: Life | None = None
        self._answered_s = 0.0  # when it was last known to be alive; monotonic
        self._asking: asyncio.Task[None] | None = None
        self._earlier = Counters().snapshot(num_open_sessions=0)  # the counters of its dead processes
        self._earlier_blocked_s = 0.0

    @property
    def has_room(self) -> bool:
        return self._life is not None and self.load < self.settings.local.max_concurrent

    @property
    def pid(self) -> int | None:
        """The id of its process, while that lives."""
        return None if self._life is None else self._life.process.pid

    async def start(self) -> None:
        """Start a process and wait until it takes rollouts. Raises ProcessDied, and ConfigError for its settings."""
        process, client = await self._stack.enter_async_context(
            start_worker(self.settings, self._logs, self._on_warning, self._hosts)
        )
        self._life = Life(process, client)
        if self._engines is not None:
            client.tell_engines(self._engines)
        self._answered_s = time.monotonic()
        self.deaths.begin()
        self._engine_busy.join(self._life, time.monotonic())

    def tell_engines(self, view: FleetView) -> None:
        """Send the new states of the engine's servers to this process and to those after it."""
        self._engines = view
        address = self.settings.engine.model_copy(update={"urls": (*view.serving, *view.out)})
        self.settings = self.settings.model_copy(update={"engine": address})
        if self._life is not None:
            self._life.client.tell_engines(view)

    async def run(self, spec: RolloutSpec) -> Status:
        """Run one rollout to its end. Raises Orphaned when the worker dies under it."""
        life = self._life
        assert life is not None, "only a seat with room is asked"
        self.load += 1
        try:
            return await life.client.run(spec)
        except WorkerGone:
            raise Orphaned(await asyncio.shield(life.orphans)) from None
        finally:
            self.load -= 1

    async def death(self) -> ProcessDied:
        """Wait until its process has ended, by itself or killed because it stopped answering.

        A workflow that blocks the event loop keeps every timeout from working. The worker's watchdog ends it, and this
        the process whose watchdog cannot.
        """
        assert self._life is not None, "it was started"
        limit_s = self.settings.local.rollout.block_limit_s + SILENCE_GRACE_S
        dying = asyncio.ensure_future(self._life.process.died())
        try:
            while not dying.done():
                await asyncio.wait({dying}, timeout=PULSE_S)
                await self.refresh()
                if time.monotonic() - self._answered_s > limit_s:
                    logger.warning("%s has not answered for %g s: it is killed", self.name, limit_s)
                    self._life.process.kill()
                    await asyncio.wait({dying})
            return dying.result()
        finally:
            dying.cancel()

    async def end(self) -> None:
        """Close what is open for the dead process, so that nothing is written for it any more."""
        await self._stack.aclose()

    def bury(self, orphans: tuple[str, ...]) -> None:
        """Clean up after the dead process; `orphans` are the sessions that it had left open, which have ended now."""
        life, self._life = self._life, None
        assert life is not None, "it has died before"
        self._engine_busy.leave(life)
        self._earlier = add_up([self._earlier, replace(life.gateway, num_open_sessions=0, num_engine_requests=0)])
        self._earlier_blocked_s += life.loop_blocked_s
        if not life.orphans.done():
            life.orphans.set_result(frozenset(orphans))

    def give_up(self) -> None:
        """Release everybody who waits for a burial, as there will be none."""
        if self._life is not None and not self._life.orphans.done():
            self._life.orphans.set_result(frozenset())

    async def refresh(self) -> None:
        """Ask the worker for its counters; when it does not answer soon, its last answer stands.

        Where its log says that a workflow blocks it, that is told: the worker itself cannot.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name=f"stats of {self.name}")
        await asyncio.wait({self._asking}, timeout=STATS_WAIT_S)
        if not self._asking.done() and self._life is not None:
            _, _, blocked = self._life.process.log_tail(1).partition(f" {watchdog.__name__}: ")
            if blocked:
                self._on_warning(blocked)

    @property
    def gateway(self) -> GatewayStats:
        """The counters of its gateways, by its last answer."""
        return self._earlier if self._life is None else add_up([self._earlier, self._life.gateway])

    @property
    def loop_blocked_s(self) -> float:
        return self._earlier_blocked_s + (0.0 if self._life is None else self._life.loop_blocked_s)

    async def aclose(self) -> None:
        """End the process. Harmless when done before."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        self._life = None
        await self._stack.aclose()

    async def _ask(self) -> None:
        life = self._life
        if life is None:
            return
        asked_s = time.monotonic()
        with contextlib.suppress(WorkerGone):
            self._take(life, await life.client.stats(), asked_s)

    def _take(self, life: Life, counted: Counted, asked_s: float) -> None:
        self._answered_s = time.monotonic()
        life.gateway = counted.gateway
        life.loop_blocked_s = counted.loop_blocked_s
        shift_s = life.clock.told(counted.until_s, asked_s=asked_s, got_s=self._answered_s)
        spans = [(start_s + shift_s, end_s + shift_s) for start_s, end_s in counted.engine_spans]
        self._engine_busy.add(life, spans, counted.until_s + shift_s)


MAX_ATTEMPTS = 3
"""The number of tries for a rollout whose worker dies: the rollout may be what kills it."""


class WorkerPool:
    """A `RolloutExecutor` over several processes. Made by `open_workers`."""

    def __init__(self, settings: Sequence[WorkerSettings], ledger: Ledger, logs: Path, hosts: Hosts = LOCAL) -> None:
        self._ledger = ledger
        self._engine_busy = SpanUnion()
        hand_on = _WarningsOnce()
        self.seats = tuple(Seat(one, logs, self._engine_busy, partial(hand_on, one.number), hosts) for one in settings)
        self._slots = asyncio.Semaphore(sum(one.local.max_concurrent for one in settings))
        self._rolling = BusyClock()
        self._has_changed = asyncio.Event()
        self._failure: asyncio.Future[ArealAgentError] = asyncio.get_running_loop().create_future()
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers at once. Raises ConfigError and ProcessDied."""
        try:
            async with asyncio.TaskGroup() as group:
                for seat in self.seats:
                    group.create_task(seat.start())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self._keepers = [asyncio.create_task(self._keep(seat), name=f"keeper of {seat.name}") for seat in self.seats]

    async def tell_of(self, engine: Fleet) -> None:
        """Tell all workers the states of the servers whenever they change, until cancelled."""
        told = None
        while True:
            if (view := engine.view()) != told:
                told = view
                for seat in self.seats:
                    seat.tell_engines(view)
            await engine.roster.changed()

    async def run(self, spec: RolloutSpec) -> EndedRollout:
        async with self._slots:
            with self._rolling.one():
                return await self._run(spec)

    async def stats(self) -> RolloutStats:
        await asyncio.gather(*(seat.refresh() for seat in self.seats))
        counts = add_up([seat.gateway for seat in self.seats])
        return RolloutStats(
            gateway=replace(counts, engine_busy_s=self._engine_busy.seconds),
            rolling_s=self._rolling.busy_s,
            loop_blocked_s=sum(seat.loop_blocked_s for seat in self.seats),
        )

    async def failure(self) -> ArealAgentError:
        return await asyncio.shield(self._failure)

    async def aclose(self) -> None:
        """End all workers; what they leave open ends as orphans."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        await asyncio.gather(*(seat.aclose() for seat in self.seats))
        for seat in self.seats:
            await self._ledger.end_orphans(shard_name(seat.settings.number))

    async def _run(self, spec: RolloutSpec) -> EndedRollout:
        lost: tuple[str, ...] = ()
        attempt = spec
        while True:
            seat = await self._free_seat()
            try:
                status = await seat.run(attempt)
            except Orphaned as orphaned:
                ended = await self._status_of(attempt.session_id, orphaned)
                if ended is None:
                    continue
                if ended is Status.ORPHAN and len(lost) + 1 < MAX_ATTEMPTS:
                    lost = (*lost, attempt.session_id)
                    attempt = replace(spec, session_id=f"{spec.session_id}.{len(lost) + 1}")
                    continue
                status = ended
            finally:
                self._has_changed.set()
            return EndedRollout(session_id=attempt.session_id, status=status, lost=lost)

    async def _free_seat(self) -> Seat:
        """Return the worker with the fewest rollouts; wait while all workers with room are being restarted."""
        while True:
            if self._failure.done():
                raise self._failure.result()
            free = [seat for seat in self.seats if seat.has_room]
            if free:
                return min(free, key=lambda seat: seat.load)
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _status_of(self, session_id: str, orphaned: Orphaned) -> Status | None:
        """Return the status of a session whose worker died before answering; None when it was never opened."""
        if session_id in orphaned.sessions:
            return Status.ORPHAN
        try:
            return (await self._ledger.trajectory(session_id)).status
        except LedgerError:
            return None

    async def _keep(self, seat: Seat) -> None:
        try:
            while True:
                await self._replace(seat, await seat.death())
        except Exception as error:  # the boundary: whatever ends a keeper ends the run
            is_ours = isinstance(error, ArealAgentError)
            self._fail(error if is_ours else WorkerError(f"the {seat.name} could not be kept: {error!r}"))

    async def _replace(self, seat: Seat, death: ProcessDied | None) -> None:
        """Bury a dead worker and start it again, repeatedly if need be. Raises ProcessDied when it dies too often."""
        await seat.end()
        orphans = await self._ledger.end_orphans(shard_name(seat.settings.number))
        seat.bury(orphans)
        while death is not None:
            how = str(death).partition(";")[0]
            if seat.deaths.end():
                raise ProcessDied(f"{MAX_DEATHS} deaths within {WITHIN_S:g} s of service; the last: {death}")
            logger.warning("%s; it is started again; rollouts it had open: %d", how, len(orphans))
            death = await _start_again(seat)
        self._has_changed.set()

    def _fail(self, error: ArealAgentError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)
        for seat in self.seats:
            seat.give_up()
        self._has_changed.set()


def shard_name(number: int) -> str:
    """Return the ledger's name for the file that a worker writes: `ledger-w0.sqlite` is that of `w0`."""
    return f"w{number}"


@asynccontextmanager
async def open_workers(
    settings: Sequence[WorkerSettings], ledger: Ledger, logs: Path, hosts: Hosts = LOCAL
) -> AsyncGenerator[WorkerPool]:
    """Start the workers; they are ended on leaving."""
    pool = WorkerPool(settings, ledger, logs, hosts)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()


class _WarningsOnce:
    """Logs the warnings of workers as the run's own, each text once."""

    def __init__(self) -> None:
        self._told: deque[str] = deque(maxlen=100)

    def __call__(self, number: int, text: str) -> None:
        if text not in self._told:
            self._told.append(text)
            logger.warning("worker %d: %s", number, text)


async def _start_again(seat: Seat) -> ProcessDied | None:
    """Start it; return its death when it dies, or None when it lives."""
    try:
        await seat.start()
    except ProcessDied as death:
        return death
    return None
