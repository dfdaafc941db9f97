"""The seam between a run and where its rollouts run: in this process (local.py) or in others (cluster/workers.py)."""

from dataclasses import dataclass
from typing import Protocol

from areal_agent.errors import ArealAgentError
from areal_agent.gateway.stats import GatewayStats
from areal_agent.rollout.runner import RolloutSpec
from areal_agent.types import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRollout:
    """How a rollout ended, and which session has its trajectory.

    `lost` are sessions of earlier attempts at it, whose processes died: they are orphans in the ledger.
    """

    session_id: str
    status: Status
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStats:
    """What was counted since the start, over all gateways."""

    gateway: GatewayStats
    rolling_s: float  # seconds with at least one rollout under way
    loop_blocked_s: float  # seconds in which a workflow blocked the event loop of its process


class RolloutExecutor(Protocol):
    """Runs rollouts."""

    async def run(self, spec: RolloutSpec) -> EndedRollout:
        """Run one to its end; when this returns, the ledger has its trajectory. Cancelling it ends its session."""
        ...

    async def stats(self) -> RolloutStats: ...

    async def failure(self) -> ArealAgentError:
        """Wait until no rollout can run any more; why."""
        ...
