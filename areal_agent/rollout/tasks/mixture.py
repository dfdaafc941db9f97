"""Which of several sources a position of the stream belongs to, by their weights. Pure; it knows no tasks.

Not by chance: at every position each source has had its share, to within one for each source before it, so that every
batch has the mix that was asked for. Of p positions, source 0 has floor(p w_0 / W); what is left is divided the same
way among the others. A position is looked up in as many steps as there are sources, and nothing is kept.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

FINEST_WEIGHT = 10**6
"""Weights are taken as fractions with at most this denominator, so that counting is exact, however far the stream."""


class Place(NamedTuple):
    """The `number`-th, from 0, of what source number `source` gives."""

    source: int
    number: int


class Mixture:
    """Positions divided among sources.

    >>> mixture = Mixture([2.0, 1.0])
    >>> [mixture.place(position).source for position in range(6)]
    [1, 0, 0, 1, 0, 0]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [
            max(Fraction(weight).limit_denominator(FINEST_WEIGHT), Fraction(1, FINEST_WEIGHT)) for weight in weights
        ]
        scale = math.lcm(*(one.denominator for one in fractions))
        self._weights = [int(one * scale) for one in fractions]
        self._rest = [sum(self._weights[source:]) for source in range(len(weights))]  # of a source and those after it

    def place(self, position: int) -> Place:
        for source, (weight, rest) in enumerate(zip(self._weights, self._rest, strict=True)):
            before = position * weight // rest
            if (position + 1) * weight // rest > before:
                return Place(source=source, number=before)
            position -= before
        raise AssertionError("the last source takes every position that is left")
