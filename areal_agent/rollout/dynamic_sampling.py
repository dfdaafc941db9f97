"""Dynamic sampling: groups whose rollouts all earn alike teach nothing and are replaced.

DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2: when all rewards of a group are equal, all its advantages are
zero, and the batch is smaller than it seems. Such a group is dropped (`filtered`), its capacity given back, and the
next task drawn in its place. When too many groups in a row are flat, the run ends: the model always succeeds or never.

"Alike" is judged as the advantages within a group judge it (algorithms/credit.py): from every turn on, all
rollouts with a token to train earn the same. So rollouts with equal totals differ when they earned them in other turns
or, with a discount, sooner; rewards of rollouts without a token to train do not count. A divergence paid in the reward
is computed in the trainer and not seen here, and a user's own advantage is assumed to compare as ours do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_agent.algorithms.credit import earn_alike, rollouts_of, with_causal_credit, with_parts
from areal_agent.tokens.records import token_records
from areal_agent.types import TokenRecord, Trajectory

TOLERANCE = 1e-6
"""Rewards with a smaller relative difference are alike: they are added up as 32-bit floats."""


@dataclass(slots=True)
class DynamicSampling:
    """Decides which finished groups are flat, and counts them.

    `part_weights` are the weights of named parts in the reward. With `compares_turns`, advantages also compare turns
    that met the same state.
    """

    max_flat_groups: int
    part_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    discount: float = 1.0
    compares_turns: bool = False
    trains_altered: bool = False
    num_flat: int = 0
    in_a_row: int = 0
    last_flat: str = ""

    def replaces(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether these completed siblings have no spread in reward. Call it once per group."""
        records = self._trainable(trajectories)
        rollouts = rollouts_of(records)
        is_flat = len(rollouts) < self._least_rollouts or earn_alike(
            records, self.discount, TOLERANCE, compares_turns=self.compares_turns
        )
        self.in_a_row = self.in_a_row + 1 if is_flat else 0
        if is_flat:
            self.num_flat += 1
            self.last_flat = self._told([one for one in trajectories if one.session_id in rollouts], trajectories)
        return is_flat

    def describe(self) -> str:
        """Return why the run ends once `is_exhausted`."""
        return (
            f"{self.in_a_row} groups in a row had no spread in reward, the last was {self.last_flat}. The model always "
            "succeeds on these tasks or never does: give it harder or easier ones, see whether the reward can differ, "
            "or set algorithm.dynamic_sampling to false (rollout.max_flat_groups is the limit)"
        )

    @property
    def _least_rollouts(self) -> int:
        """The number of rollouts that can be told apart: one will do where its turns are compared."""
        return 1 if self.compares_turns else 2

    @property
    def is_exhausted(self) -> bool:
        return self.in_a_row >= self.max_flat_groups

    def _trainable(self, trajectories: Sequence[Trajectory]) -> list[TokenRecord]:
        """Return the records of rollouts with a token to train, rewarded as the trainer will reward them."""
        records = [record for one in trajectories for record in token_records(one, trains_altered=self.trains_altered)]
        trainable = {record.session_id for record in records if record.loss_mask.any()}
        paid, _ = with_parts(
            [record for record in records if record.session_id in trainable],
            {one.session_id: one.rewards.total for one in trajectories},
            {one.session_id: one.rewards.parts for one in trajectories},
            self.part_weights,
        )
        return with_causal_credit(paid, self.discount)

    def _told(self, trainable: Sequence[Trajectory], group: Sequence[Trajectory]) -> str:
        task = f"task {group[0].task_id!r}"
        if len(trainable) < self._least_rollouts:
            return f"{task}: {len(trainable)} of {len(group)} rollouts had a token to train"
        return f"{task}: {len(trainable)} rollouts, each with reward {self._reward(trainable[0]):g}"

    def _reward(self, trajectory: Trajectory) -> float:
        rewards = trajectory.rewards
        return rewards.total + sum(weight * rewards.parts.get(name, 0.0) for name, weight in self.part_weights.items())
