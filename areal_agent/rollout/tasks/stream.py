"""The order in which tasks are used: the n-th task is a function of n, so a stream has no state. Pure functions.

Mixing: at every position each source has had its share, to within one for each source before it, so every batch has the
mix that was asked for. Of p positions, source 0 has floor(p w_0 / W); the rest is divided the same way among the other
sources. A look-up takes as many steps as there are sources.

Shuffling: a Feistel network of `ROUNDS` rounds permutes the 2^(2h) numbers of 2h bits, with 2^(2h) >= size; a number
that falls outside is permuted again until it falls inside (cycle walking), at most 4 times in the mean (Black, Rogaway:
Ciphers with arbitrary finite domains, CT-RSA 2002). A shuffled list would cost memory and a pause per epoch, and a
resume would have to shuffle again up to where it was.
"""

import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from areal_agent.errors import ConfigError
from areal_agent.rollout.tasks.loading import TaskSet
from areal_agent.types import Task

FINEST_WEIGHT = 10**6
"""Weights become fractions with at most this denominator, so that counting is exact, however long the stream."""


class Place(NamedTuple):
    """The `number`-th task, from 0, of source number `source`."""

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


ROUNDS = 6


def permuted(index: int, size: int, key: str) -> int:
    """Return the place of `index` in a permutation of [0, size) that depends on the key.

    >>> sorted(permuted(index, 5, "seed 0") for index in range(5))
    [0, 1, 2, 3, 4]
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    place = _feistel(index, half_bits, digest)
    while place >= size:
        place = _feistel(place, half_bits, digest)
    return place


def _feistel(number: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for turn in range(ROUNDS):
        mixed = hashlib.blake2b(f"{turn}/{right}".encode(), key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(mixed) & mask)
    return left << half_bits | right


def fraction(key: str) -> float:
    """Return a number in [0, 1) that depends only on the key.

    >>> 0.0 <= fraction("seed 0") < 1.0
    True
    """
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64


class TaskStream:
    """An endless stream. Each source has epochs of its own, in each of which each of its tasks comes once.

    >>> stream = TaskStream(TaskSet.of([Task(id=str(i), data={}) for i in range(3)]), seed=0)
    >>> sorted(stream.at(position).id for position in (3, 4, 5))
    ['0', '1', '2']
    """

    def __init__(self, tasks: TaskSet, *, seed: int, shuffle: bool = True) -> None:
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self._mixture = Mixture([source.weight for source in tasks.sources])

    def at(self, position: int) -> Task:
        place = self._mixture.place(position)
        source = self.tasks.sources[place.source]
        epoch, offset = divmod(place.number, len(source.tasks))
        if self.shuffle:
            offset = permuted(offset, len(source.tasks), f"{self.seed}/{source.name}/{epoch}")
        return source.tasks[offset]

    def fingerprint(self) -> str:
        """Return a text that changes when the task of a position may have changed."""
        return f"{self.tasks.fingerprint()}/{self.seed if self.shuffle else 'in order'}"


def in_order(tasks: TaskSet, wanted: int, key: str) -> tuple[Task, ...]:
    """Return the first tasks, with each source's share. Raises ConfigError, naming `key`, when there are too few."""
    stream = TaskStream(tasks, seed=0, shuffle=False)
    first = tuple(stream.at(position) for position in range(wanted))
    num_different = len({task.id for task in first})
    if num_different < wanted:
        shares = "" if len(tasks.sources) == 1 else ", each source in proportion to its weight"
        raise ConfigError(
            f"{key} is {wanted}, but there are only {num_different} such held-out tasks{shares}; lower it"
        )
    return first
