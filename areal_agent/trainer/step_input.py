"""What one train step is given. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_agent.types import TokenRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """Records, and what their rollouts earned: by session id, for each rollout that has a record."""

    step: int  # the version that the step makes
    records: Sequence[TokenRecord]
    rewards: Mapping[str, float]  # in total
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])  # named
    incarnation: int = 0  # of the weights that it starts from: tokens of this and of version step - 1 are fresh
