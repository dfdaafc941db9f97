"""Which version labels are the trainer's own, and what step they stand for. Pure.

A label `incarnation:step` names weights of one run. Its step can be compared with the trainer's only where the
incarnation is one of the trainer's: of weights that it never had nobody can say how old they are to it.
"""

from dataclasses import dataclass, replace
from typing import Self

from areal_agent.types import WeightVersion

FOREIGN = -(2**30)
"""The step of another trainer's weights: beyond every staleness bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The incarnations of the trainer. Without any it has named none, and every label is taken for its own.

    >>> labels = Labels(incarnations=(0, 3))
    >>> [labels.step_of(WeightVersion.parse(text)) for text in ("0:7", "3:5")]
    [7, 5]
    >>> labels.step_of(WeightVersion.parse("1:7")) == FOREIGN
    True
    """

    incarnations: tuple[int, ...] = ()

    def step_of(self, version: WeightVersion) -> int:
        """As staleness counts it. Tokens of the trainer's own weights that a crash has undone count by their step."""
        is_own = not self.incarnations or version.incarnation in self.incarnations
        return version.step if is_own else FOREIGN

    def naming(self, incarnation: int) -> Self:
        """With one incarnation more."""
        if incarnation in self.incarnations:
            return self
        return replace(self, incarnations=(*self.incarnations, incarnation))
