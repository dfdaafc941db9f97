"""Batches from a gateway that stands alone: its agents, its engine and its ledger are somebody else's.

A batch comes by lease; the weights go to the engine behind that gateway; a published version moves the gateway's
staleness bound, and a checkpoint acknowledges the leases. The gateway may be gone for a while: every call is made
again.

A run has a name at the gateway, kept in its own ledger. One that begins takes the gateway over from whoever had it:
what that one trained stays trained, and what waits is this one's.
"""

import contextlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from areal_agent.config import Config
from areal_agent.engine.address import EngineAddress
from areal_agent.engine.config import EngineConfig
from areal_agent.engine.served import ServedEngine
from areal_agent.errors import ArealAgentError, ConfigError, EngineError, GatewayError
from areal_agent.eval_report import EvalAnswer, EvalReport
from areal_agent.gateway.admin_key import find_admin_key
from areal_agent.gateway.online.wire import GatewayStatus, State
from areal_agent.gateway.stats import add_up
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.executor import RolloutStats
from areal_agent.rollout.online import OnlineGateway
from areal_agent.source import SourceCounts
from areal_agent.types import JsonObject, RolloutBatch, Task, WeightVersion

logger = logging.getLogger(__name__)

LEASE_WAIT_S = 30.0
"""How long one call for a batch waits at the gateway before it is made again."""

TRAINER_NOTE = "online_trainer"
"""The note in the run's ledger on what the run is called at the gateway."""


@dataclass(kw_only=True, slots=True)
class OnlineRollouts:
    """A `Source`: a gateway that stands alone; its agents, its engine and its ledger are somebody else's."""

    config: Config
    engine: ServedEngine
    gateway: OnlineGateway
    step: int  # the version that was published last
    lease_wait_s: float = LEASE_WAIT_S
    _has_warned: bool = False
    _state: State | None = None
    _last: GatewayStatus | None = None
    _earlier: list[GatewayStatus] = field(default_factory=list[GatewayStatus])  # of processes that ended meanwhile

    async def produce(self) -> None:
        """Others do."""

    async def take(self, step: int) -> RolloutBatch:
        config = self.config
        straggler_wait_s = config.rollout.straggler_wait_s if config.straggler == "wait" else 0.0
        while True:
            batch, self._state = await self.gateway.lease(
                step, num_groups=config.batch_size, wait_s=self.lease_wait_s, straggler_wait_s=straggler_wait_s
            )
            if batch is not None:
                return batch
            self._warn_if_idle(step, self._state)

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        raise ConfigError("rollout_batch needs rollouts of the run's own; with rollout.gateway_url call prepare_batch")

    def drained(self) -> AbstractAsyncContextManager[None]:
        raise ConfigError("engine.on_push 'drain' needs rollouts of the run's own; leave it out")

    def memory_lent(self) -> AbstractAsyncContextManager[None]:
        """The engine is somebody else's: it keeps what it has."""
        return contextlib.nullcontext()

    async def publish(self, version: WeightVersion) -> None:
        self._state = await self.gateway.publish(
            version.step,
            incarnation=version.incarnation,
            batch_answers=self.config.batch_answers,
            max_staleness=self.config.max_staleness,
        )
        self.step = version.step

    async def state(self, step: int) -> JsonObject:
        """Nothing: tasks and leases are the gateway's."""
        return {}

    async def commit(self, step: int, checkpoint: Path) -> None:
        if step > 0:
            await self.gateway.acknowledge(step, str(checkpoint))

    async def settle(self, *, is_completed: bool) -> None:
        """What waits there stays for the next trainer; a batch that was asked for and never came, too."""
        await self.gateway.give_back(self.step)

    async def evaluate(
        self, tasks: tuple[Task, ...], group_id: str, on_answer: Callable[[EvalAnswer], None], max_concurrent: int
    ) -> EvalReport:
        raise ConfigError("evaluation needs a workflow of the run's own; with rollout.gateway_url there is none")

    async def stats(self) -> RolloutStats:
        """Over all processes that the gateway has been since the run began: a restarted one counts from zero."""
        status = await self.gateway.status()
        if self._last is not None and status.stats.sent_bytes < self._last.stats.sent_bytes:
            self._earlier.append(self._last)
        self._last, self._state = status, status.state
        lives = [*self._earlier, status]
        return RolloutStats(
            gateway=add_up([life.stats for life in lives]),
            rolling_s=sum(life.state.rolling_s for life in lives),
            loop_blocked_s=0.0,
        )

    async def count_tokens(self) -> tuple[int, int] | None:
        return None

    def counts(self) -> SourceCounts:
        assert self._state is not None  # a version was published before any batch
        return SourceCounts(
            running=self._state.num_running,
            finished=self._state.num_finished,
            statuses=self._state.statuses,
            drops=self._state.drops,
        )

    def process_ids(self) -> Mapping[str, int]:
        """None: they are elsewhere."""
        return {}

    def failures(self) -> Mapping[str, Awaitable[ArealAgentError]]:
        """None that can be waited for: a gateway may be gone for a while, and what fails is raised where it fails."""
        return {}

    def _warn_if_idle(self, step: int, state: State) -> None:
        """Say once why a batch does not come: nobody plays, or not in groups that make a batch."""
        if self._has_warned or state.num_running > 0:
            return
        self._has_warned = True
        logger.warning(
            "no batch for step %d within %g s, and no agent plays at %s: %d answers wait there, and %s more may start; "
            "a step takes %d groups of %d (batch_size, group_size). Start agents that play groups of %d",
            step,
            self.lease_wait_s,
            self.gateway.url,
            state.num_finished,
            state.capacity,
            self.config.batch_size,
            self.config.group_size,
            self.config.group_size,
        )


@asynccontextmanager
async def open_online_rollouts(config: Config, ledger: Ledger, step: int) -> AsyncGenerator[OnlineRollouts]:
    """Connect, and let what was leased after the checkpoint of `step` wait again. Raises ConfigError.

    `ledger` is the run's own.
    """
    assert config.rollout.gateway_url is not None  # the config has seen to it
    async with AsyncExitStack() as stack:
        engine = await connect_engine(config.engine)
        stack.push_async_callback(engine.aclose)
        admin_key = find_admin_key(config.rollout.gateway_admin_key_file, os.environ)
        trainer = await trainer_name(ledger)
        gateway = OnlineGateway(config.rollout.gateway_url, admin_key, trainer=trainer)
        stack.push_async_callback(gateway.aclose)
        try:
            await gateway.check()
        except GatewayError as error:
            raise ConfigError(f"rollout.gateway_url: {error}") from error
        await take_over(gateway, trainer, step)
        yield OnlineRollouts(config=config, engine=engine, gateway=gateway, step=step)


async def connect_engine(config: EngineConfig) -> ServedEngine:
    """The engine behind the gateway, whichever kind it is. Raises ConfigError.

    No fleet: that would put its own weights back where another trainer has taken the engine over.
    """
    assert config.url is not None  # the config has seen to it
    try:
        address = await EngineAddress.of_server(config.url)
        if config.backend not in ("embedded", address.backend):
            raise ConfigError(
                f"engine.backend is {config.backend!r}, and engine.url = {config.url} is {address.backend}; leave "
                "engine.backend out"
            )
        engine = address.client()(config.url)
        try:
            await engine.info()
        except BaseException:
            await engine.aclose()
            raise
    except EngineError as error:
        raise ConfigError(f"engine.url: {error}") from error
    return engine


async def trainer_name(ledger: Ledger) -> str:
    """What the run is called at a gateway; the same whenever it is resumed."""
    name = await ledger.get_note(TRAINER_NOTE)
    if name is None:
        name = f"run-{secrets.token_hex(8)}"
        await ledger.set_note(TRAINER_NOTE, name)
    return str(name)


async def take_over(gateway: OnlineGateway, trainer: str, step: int) -> None:
    """Go on from the checkpoint of `step`; say so when somebody else has trained there."""
    found = (await gateway.status()).state
    num_returned = await gateway.give_back(step, adopt=True)
    if found.trainer != trainer and (found.trainer or found.leased):
        logger.warning(
            "the gateway at %s has served %s up to step %d: what that trained stays trained; this run takes over "
            "the %d answers that wait there, %d of them leased and never trained",
            gateway.url,
            f"trainer {found.trainer}" if found.trainer else "a nameless trainer",
            found.leased,
            found.num_finished + num_returned,
            num_returned,
        )
