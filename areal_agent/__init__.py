"""areal_agent: train agents by asynchronous reinforcement learning.

A workflow is an `async def solve(task, rollout)`; `python -m areal_agent.train --config FILE` trains with it, and
`areal_agent.run.Run` is the same loop in a script of your own. Importing this module loads neither torch nor
transformers nor openai.
"""

from areal_agent.errors import ArealAgentError, ConfigError, Reject, SandboxError
from areal_agent.rollout.context import Role, Rollout
from areal_agent.types import (
    Completion,
    Fate,
    Rewards,
    RolloutBatch,
    Status,
    Task,
    TokenRecord,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
    WeightVersion,
)

__version__ = "0.2.0"

__all__ = [
    "ArealAgentError",
    "Completion",
    "ConfigError",
    "Fate",
    "Reject",
    "Rewards",
    "Role",
    "Rollout",
    "RolloutBatch",
    "SandboxError",
    "Status",
    "Task",
    "TokenRecord",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "VersionSpan",
    "WeightVersion",
]
