"""The executors of rollouts: the protocol, and rollouts in this process. (Those in workers: cluster/workers.py.)

    runner ── HTTP ──▶ gateway ── Sampler ──▶ engine
                          └── Journal ──▶ ledger

A watchdog beside the event loop finds workflows that block it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from areal_agent.errors import ArealAgentError
from areal_agent.gateway.app import Gateway
from areal_agent.gateway.auth import new_key
from areal_agent.gateway.bodies import Limits
from areal_agent.gateway.metrics import GatewayStats
from areal_agent.images import ImageFolder
from areal_agent.protocols import Journal, Sampler
from areal_agent.rollout.config import RolloutConfig, SandboxConfig
from areal_agent.rollout.context import SharedResources
from areal_agent.rollout.models import open_models
from areal_agent.rollout.runner import Manner, RolloutRunner, RolloutSpec, open_clients
from areal_agent.rollout.unawaited import unawaited_calls
from areal_agent.rollout.watchdog import Watchdog
from areal_agent.rollout.workflow import Workflow, load_workflow
from areal_agent.tokens.renderer import Renderer
from areal_agent.types import EngineInfo, Status


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRollout:
    """The status of a finished rollout, and the session with its trajectory.

    `lost` are the sessions of earlier attempts, whose processes died: they are orphans in the ledger.
    """

    session_id: str
    status: Status
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """Counters since the start, over all gateways."""

    gateway: GatewayStats
    rolling_s: float  # seconds with at least one rollout under way
    loop_blocked_s: float  # seconds in which a workflow blocked the event loop of its process


class RolloutExecutor(Protocol):
    """Runs rollouts."""

    async def run(self, spec: RolloutSpec) -> EndedRollout:
        """Run one rollout to its end, with its trajectory in the ledger. Cancelling it ends its session."""
        ...

    async def stats(self) -> RolloutStats: ...

    async def failure(self) -> ArealAgentError:
        """Wait until no rollout can run any more, and return the reason."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSettings:
    """How the tasks of a benchmark are played. `workflow` is `package.module:name`."""

    workflow: str
    rollout: RolloutConfig
    sandbox: SandboxConfig

    def manner(self) -> Manner:
        """Import the workflow. Raises ConfigError."""
        return Manner(
            workflow=load_workflow(self.workflow),
            timeout_s=self.rollout.timeout_s,
            session=self.rollout.session,
            sandbox=self.sandbox.model_dump(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """The settings that all rollouts of one process share. `port` is the gateway's."""

    model_name: str
    port: int
    max_concurrent: int
    rollout: RolloutConfig
    sandbox: SandboxConfig
    benchmarks: Mapping[str, BenchmarkSettings] = field(default_factory=dict[str, BenchmarkSettings])


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSettings(RunnerSettings):
    """Those of rollouts behind a gateway of their own. `tokenizer` is a Hugging Face folder.

    `images` is the run's folder of images; None where its disk is not shared, and images are refused.
    """

    tokenizer: Path
    images: Path | None = None


class LocalRollouts:
    """A `RolloutExecutor`. Made by `open_local`."""

    def __init__(
        self,
        gateway_stats: Callable[[], GatewayStats],
        runner: RolloutRunner,
        watchdog: Watchdog,
        failing: asyncio.Future[ArealAgentError],
    ) -> None:
        self._gateway_stats = gateway_stats
        self._runner = runner
        self._watchdog = watchdog
        self._failing = failing

    async def run(self, spec: RolloutSpec) -> EndedRollout:
        return EndedRollout(session_id=spec.session_id, status=await self._runner.run(spec))

    async def stats(self) -> RolloutStats:
        return RolloutStats(
            gateway=self._gateway_stats(),
            rolling_s=self._runner.running.busy_s,
            loop_blocked_s=self._watchdog.blocked_s,
        )

    async def failure(self) -> ArealAgentError:
        """Wait until an API refuses every call; other errors in this process are raised where they happen."""
        return await asyncio.shield(self._failing)


@asynccontextmanager
async def open_local(
    settings: LocalSettings, workflow: Workflow, *, engine: Sampler, info: EngineInfo, journal: Journal
) -> AsyncGenerator[LocalRollouts]:
    """Serve a gateway in front of `engine`, and run rollouts of this process against it."""
    config = settings.rollout
    async with AsyncExitStack() as stack:
        admin_key = new_key()  # nobody else has it: every session of this gateway is ours
        renderer = await asyncio.to_thread(
            Renderer.load,
            settings.tokenizer,
            history_thinking=config.history_thinking,
            tool_format=config.tool_format,
            reasoning_format=config.reasoning_format,
        )
        await asyncio.to_thread(renderer.vision)  # which takes seconds
        gateway = Gateway(
            sampler=engine,
            renderer=renderer,
            journal=journal,
            model_name=settings.model_name,
            admin_key=admin_key,
            max_context_tokens=info.max_context_tokens,
            vocab_size=info.vocab_size,
            has_grammar=info.has_grammar,
            images=settings.images and ImageFolder(settings.images),
            limits=Limits(image_sources=config.image_sources),
        )
        served = await gateway.serve("127.0.0.1", settings.port)
        stack.push_async_callback(served.aclose)
        endless = asyncio.get_running_loop().create_future()
        opening = open_runner(settings, workflow, served.base_url, admin_key, gateway.stats, endless)
        yield await stack.enter_async_context(opening)


@asynccontextmanager
async def open_runner(
    settings: RunnerSettings,
    workflow: Workflow,
    gateway_url: str,
    admin_key: str,
    gateway_stats: Callable[[], GatewayStats],
    failing: asyncio.Future[ArealAgentError],
) -> AsyncGenerator[LocalRollouts]:
    """Run rollouts of this process against the gateway at a URL, until `failing` says that none can run any more."""
    config = settings.rollout
    async with AsyncExitStack() as stack:
        runner = RolloutRunner(
            workflow,
            gateway_url=gateway_url,
            admin_key=admin_key,
            model=settings.model_name,
            clients=await stack.enter_async_context(open_clients()),
            shared=await stack.enter_async_context(SharedResources()),
            max_concurrent=settings.max_concurrent,
            timeout_s=config.timeout_s,
            session=config.session,
            sandbox=settings.sandbox.model_dump(),
            models=await stack.enter_async_context(open_models(config.models)),
            unawaited=stack.enter_context(unawaited_calls()),
            benchmarks={name: one.manner() for name, one in settings.benchmarks.items()},
        )
        watchdog = stack.enter_context(Watchdog.of_this_loop(warn_s=config.block_warn_s, limit_s=config.block_limit_s))
        yield LocalRollouts(gateway_stats, runner, watchdog, failing)
