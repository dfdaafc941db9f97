"""Dynamic sampling: groups whose rewards have no spread teach nothing and are replaced. It knows no buffer.

DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2: with every reward of a group alike all its advantages are zero,
and the batch is smaller than it says. Such a group is dropped (`filtered`), its capacity given back, and the next task
drawn in its place. When group after group is flat, the model always succeeds or never does: that ends the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_agent.types import Trajectory

TOLERANCE = 1e-6
"""Rewards that differ by less, of their size, are alike: they are added up as 32-bit floats."""


@dataclass(slots=True)
class DynamicSampling:
    """Judges finished groups, and counts.

    `part_weights` are what named parts of the reward add to it.
    """

    max_flat_groups: int
    part_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    num_flat: int = 0
    in_a_row: int = 0
    last_flat: str = ""

    def replaces(self, trajectories: Sequence[Trajectory]) -> bool:
        """Whether these trainable siblings have no spread. Call it once a group."""
        rewards = [self._reward(one) for one in trajectories]
        is_flat = not self._differ(rewards) and len({_by_completion(one) for one in trajectories}) == 1
        self.in_a_row = self.in_a_row + 1 if is_flat else 0
        if is_flat:
            self.num_flat += 1
            self.last_flat = (
                f"task {trajectories[0].task_id!r}: {len(rewards)} rollouts, each with reward {rewards[0]:g}"
            )
        return is_flat

    def describe(self) -> str:
        """Why the run ends once it is exhausted."""
        return (
            f"{self.in_a_row} groups in a row had no spread in reward, the last was {self.last_flat}. The model always "
            "succeeds on these tasks or never does: give it harder or easier ones, see whether the reward can differ, "
            "or set algorithm.dynamic_sampling to false (rollout.max_flat_groups is the limit)"
        )

    @property
    def is_exhausted(self) -> bool:
        return self.in_a_row >= self.max_flat_groups

    def _reward(self, trajectory: Trajectory) -> float:
        rewards = trajectory.rewards
        return rewards.total + sum(weight * rewards.parts.get(name, 0.0) for name, weight in self.part_weights.items())

    @staticmethod
    def _differ(rewards: Sequence[float]) -> bool:
        low, high = min(rewards), max(rewards)
        return high - low > TOLERANCE * max(1.0, abs(low), abs(high))


def _by_completion(trajectory: Trajectory) -> tuple[float, ...]:
    """In the order of the calls: alike in sum, they may still tell one turn from another."""
    return tuple(trajectory.rewards.by_completion.values())
