"""The rollout workers of a run: spreads rollouts over them, and keeps them alive.

    run(spec) ──▶ the worker with the fewest rollouts ──▶ ended
       ▲                        │ its process died: its open sessions end as orphans, it is started again
       └── the same rollout, under a new session id if the old one is an orphan

One keeper task a worker, owned by the pool, waits for its death. Three deaths of one worker within a minute of service
end it all.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from areal_agent.cluster.deaths import MAX_DEATHS, WITHIN_S
from areal_agent.cluster.seat import Orphaned, Seat
from areal_agent.engine.fleet.fleet import Fleet
from areal_agent.errors import ArealAgentError, LedgerError, ProcessDied, WorkerError
from areal_agent.gateway.stats import add_up
from areal_agent.ledger.ledger import Ledger
from areal_agent.observe.busy import BusyClock
from areal_agent.observe.spans import SpanUnion
from areal_agent.rollout.executor import EndedRollout, RolloutStats
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.worker.messages import WorkerSettings
from areal_agent.types import Status

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often a rollout is tried under which workers die: it may be what kills them."""


class WorkerPool:
    """A `RolloutExecutor` over several processes. Made by `open_workers`."""

    def __init__(self, settings: Sequence[WorkerSettings], ledger: Ledger, logs: Path) -> None:
        self._ledger = ledger
        self._engine_busy = SpanUnion()
        hand_on = _WarningsOnce()
        self.seats = tuple(Seat(one, logs, self._engine_busy, partial(hand_on, one.number)) for one in settings)
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
        """Tell all workers how the servers are, at once whenever that changes. Until cancelled."""
        told = None
        while True:
            if (view := engine.view()) != told:
                told = view
                for seat in self.seats:
                    seat.tell_engines(view)
            await engine.changed()

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
        """The worker with the fewest rollouts; waits while those that have room are being started again."""
        while True:
            if self._failure.done():
                raise self._failure.result()
            free = [seat for seat in self.seats if seat.has_room]
            if free:
                return min(free, key=lambda seat: seat.load)
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _status_of(self, session_id: str, orphaned: Orphaned) -> Status | None:
        """How a session ended whose worker died before it could say so; None when the session was never opened."""
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
        """Bury a dead worker and start it again, as often as it takes. Raises ProcessDied when that is too often."""
        orphans = await self._ledger.end_orphans(shard_name(seat.settings.number))
        await seat.bury(orphans)
        while death is not None:
            how = str(death).partition(";")[0]
            if seat.deaths.end():
                raise ProcessDied(f"{MAX_DEATHS} deaths within {WITHIN_S:g} s of service; at last {death}")
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
    """The ledger's name for the file that a worker writes: `ledger-w0.sqlite` is that of `w0`."""
    return f"w{number}"


@asynccontextmanager
async def open_workers(settings: Sequence[WorkerSettings], ledger: Ledger, logs: Path) -> AsyncGenerator[WorkerPool]:
    """Start the workers; ended on leaving."""
    pool = WorkerPool(settings, ledger, logs)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.aclose()


class _WarningsOnce:
    """A worker's warnings are warnings of the run; what one of them has said, others need not repeat."""

    def __init__(self) -> None:
        self._told: deque[str] = deque(maxlen=100)

    def __call__(self, number: int, text: str) -> None:
        if text not in self._told:
            self._told.append(text)
            logger.warning("worker %d: %s", number, text)


async def _start_again(seat: Seat) -> ProcessDied | None:
    """None when it lives."""
    try:
        await seat.start()
    except ProcessDied as death:
        return death
    return None
