"""The place of one rollout worker in a run: one process after the other, if need be. It knows no other worker.

::

    start ─▶ alive ─▶ (its process dies) ─▶ bury: what it left open is an orphan ─▶ start ...
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from areal_agent.cluster.deaths import DeathCount
from areal_agent.cluster.local import start_worker
from areal_agent.engine.fleet.view import FleetView
from areal_agent.errors import ProcessDied
from areal_agent.gateway.stats import Counters, GatewayStats, add_up
from areal_agent.observe.spans import SpanUnion
from areal_agent.process import ManagedProcess
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.rollout.worker.client import WorkerClient, WorkerGone
from areal_agent.rollout.worker.messages import Counted, WorkerSettings
from areal_agent.types import Status

STATS_WAIT_S = 1.0
"""How long a worker is waited for that is asked what it counted: a blocked one tells when it can."""

PULSE_S = 5.0
"""How often a worker has to answer; one that is silent for longer than a rollout may take, and a grace, is killed."""

SILENCE_GRACE_S = 5.0

logger = logging.getLogger(__name__)


class Orphaned(Exception):
    """The worker died under a rollout. `sessions` are all that it left open, which are orphans now."""

    def __init__(self, sessions: frozenset[str]) -> None:
        super().__init__(f"{len(sessions)} sessions")
        self.sessions = sessions


class Life:
    """One process of a worker, from its start to its burial."""

    def __init__(self, process: ManagedProcess, client: WorkerClient) -> None:
        self.process = process
        self.client = client
        self.orphans: asyncio.Future[frozenset[str]] = asyncio.get_running_loop().create_future()
        self.gateway: GatewayStats = Counters().snapshot(num_open_sessions=0)
        self.loop_blocked_s = 0.0


class Seat:
    """Holds one worker. `engine_busy` unites the busy time of all workers' requests."""

    def __init__(
        self,
        settings: WorkerSettings,
        logs: Path,
        engine_busy: SpanUnion,
        on_warning: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.name = f"worker {settings.number}"
        self.load = 0  # rollouts under way
        self.deaths = DeathCount()
        self._logs = logs
        self._engine_busy = engine_busy
        self._on_warning = on_warning
        self._engines: FleetView | None = None  # what was said of them last
        self._stack = AsyncExitStack()
        self._life: Life | None = None
        self._answered_s = 0.0  # when it was last known to be alive; monotonic
        self._asking: asyncio.Task[None] | None = None
        self._earlier = Counters().snapshot(num_open_sessions=0)  # what its dead processes had counted
        self._earlier_blocked_s = 0.0

    @property
    def has_room(self) -> bool:
        return self._life is not None and self.load < self.settings.local.max_concurrent

    @property
    def pid(self) -> int | None:
        """Of its process, while that lives."""
        return None if self._life is None else self._life.process.pid

    async def start(self) -> None:
        """Start a process and wait until it takes rollouts. Raises ProcessDied, and ConfigError for its settings."""
        process, client = await self._stack.enter_async_context(
            start_worker(self.settings, self._logs, self._on_warning)
        )
        self._life = Life(process, client)
        if self._engines is not None:
            client.tell_engines(self._engines)
        self._answered_s = time.monotonic()
        self.deaths.begin()
        self._engine_busy.join(self._life, time.monotonic())

    def tell_engines(self, view: FleetView) -> None:
        """How the servers of the engine are from now on, for this process and those after it."""
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
        """Wait until its process has ended, by itself or because it did not answer any more.

        A workflow that blocks the event loop for ever keeps every time-out from working; only its process can be ended.
        """
        assert self._life is not None, "it was started"
        timeout_s = self.settings.local.rollout.timeout_s
        dying = asyncio.ensure_future(self._life.process.died())
        try:
            while not dying.done():
                await asyncio.wait({dying}, timeout=min(PULSE_S, timeout_s))
                await self.refresh()
                if time.monotonic() - self._answered_s > timeout_s + SILENCE_GRACE_S:
                    logger.warning("%s has not answered for rollout.timeout_s = %g: it is killed", self.name, timeout_s)
                    self._life.process.kill()
                    await asyncio.wait({dying})
            return dying.result()
        finally:
            dying.cancel()

    async def bury(self, orphans: tuple[str, ...]) -> None:
        """Let go of the dead process; `orphans` are the sessions that it had left open, and that have ended now."""
        life, self._life = self._life, None
        assert life is not None, "it has died before"
        await self._stack.aclose()
        self._engine_busy.leave(life)
        self._earlier = add_up([self._earlier, replace(life.gateway, num_open_sessions=0, num_engine_requests=0)])
        self._earlier_blocked_s += life.loop_blocked_s
        if not life.orphans.done():
            life.orphans.set_result(frozenset(orphans))

    def give_up(self) -> None:
        """It will not be buried: whoever waits for that waits no more."""
        if self._life is not None and not self._life.orphans.done():
            self._life.orphans.set_result(frozenset())

    async def refresh(self) -> None:
        """Ask the worker what it has counted; when it does not answer soon, its last answer stands for now."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), name=f"stats of {self.name}")
        await asyncio.wait({self._asking}, timeout=STATS_WAIT_S)

    @property
    def gateway(self) -> GatewayStats:
        """What its gateways have counted, by its last answer."""
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
        with contextlib.suppress(WorkerGone):
            self._take(life, await life.client.stats())

    def _take(self, life: Life, counted: Counted) -> None:
        self._answered_s = time.monotonic()
        life.gateway = counted.gateway
        life.loop_blocked_s = counted.loop_blocked_s
        self._engine_busy.add(life, counted.engine_spans, counted.until_s)
