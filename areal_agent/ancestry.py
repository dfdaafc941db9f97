"""What a version label is worth in the lineage that lives: how much of its history it shares. Pure.

::

    incarnation 0   0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─ 7           killed
    incarnation 1                       └── 6 ─ 7 ─ 8 ─ 9    resumed from the checkpoint of step 5

`0:7` and `1:7` are different weights, which share five updates. So a token of `0:7` is, to incarnation 1, as old as one
of step 5: it is never fresher than what both lineages have in common. Weights of which the lineage knows nothing
(another run's) share nothing: their tokens are older than any bound.
"""

from dataclasses import dataclass, replace
from typing import Self

from areal_agent.types import Completion, Trajectory, Turn, WeightVersion

FOREIGN = -(2**30)
"""The step of weights of another lineage: beyond every staleness bound, and a 32-bit number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestry:
    """The incarnations of one run, and the step at which each began. Without any, labels are taken at their word.

    >>> ancestry = Ancestry(forks=((0, 0), (1, 5)))
    >>> [ancestry.step_of(WeightVersion.parse(text)) for text in ("0:3", "0:7", "1:7")]
    [3, 5, 7]
    >>> ancestry.step_of(WeightVersion.parse("2:7")) == FOREIGN
    True
    """

    forks: tuple[tuple[int, int], ...] = ()  # (incarnation, the step that it began at), rising

    def step_of(self, version: WeightVersion) -> int:
        """The newest step of the living lineage that these weights have behind them."""
        if not self.forks:
            return version.step
        if not any(number == version.incarnation for number, _ in self.forks):
            return FOREIGN
        return min((version.step, *(began for number, began in self.forks if number > version.incarnation)))

    def forked(self, incarnation: int, step: int) -> Self:
        """With one incarnation more, that began at `step`; unchanged when it is known already."""
        if any(number == incarnation for number, _ in self.forks):
            return self
        return replace(self, forks=(*self.forks, (incarnation, step)))

    def relabelled(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory as the living lineage sees it: each version by the step that it shares.

        Nothing of another lineage is in it: that is never trained.
        """
        return replace(trajectory, turns=tuple(self._turn(turn) for turn in trajectory.turns))

    def _turn(self, turn: Turn) -> Turn:
        return replace(turn, completions=tuple(self._completion(one) for one in turn.completions))

    def _completion(self, completion: Completion) -> Completion:
        spans = (
            replace(span, version=replace(span.version, step=self.step_of(span.version)))
            for span in completion.versions
        )
        return replace(completion, versions=tuple(spans))
