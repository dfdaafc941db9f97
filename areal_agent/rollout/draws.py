"""Which task is rolled out next: the stream of tasks, its use over restarts, and the curriculum.

The n-th task of a `TaskStream` is a function of n, so a stream has no state. Mixing: at every position each source has
had its share, to within one for each source before it, so every batch has the mix that was asked for. Of p positions,
source 0 has floor(p w_0 / W); the rest is divided the same way among the other sources. Shuffling: see `permuted`.

    position   0 1 2 3 4 5 6 ...
               t t w r w ─ ─              t trained, w waits to be, r was running when the process died
    next       3, then 5, 6, ...          after the restart: first what was cut off, then what was never drawn

The ledger is the cursor: a group's id has its position, and a session is there before its first token. So nothing is
lost or doubled between two checkpoints: finished groups are restored and trained, cut-off ones are drawn again under a
new id, and each task is settled once per epoch (trained, or dropped as failed, flat or stale), however often the run is
killed. A position without a group was passed over when there is a curriculum; otherwise its process died before the
group's first session.
"""

import hashlib
import logging
import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple, Self, cast

from areal_agent.errors import ConfigError
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.rollout.config import CurriculumConfig
from areal_agent.rollout.tasks import TaskSet
from areal_agent.types import JsonObject, Task

logger = logging.getLogger(__name__)


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

    A Feistel network of `ROUNDS` rounds permutes the 2^(2h) numbers of 2h bits, with 2^(2h) >= size; a number that
    falls outside is permuted again until it falls inside (cycle walking), at most 4 times in the mean (Black, Rogaway:
    Ciphers with arbitrary finite domains, CT-RSA 2002). A shuffled list would cost memory and a pause per epoch, and a
    resume would have to shuffle again up to where it was.

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


FORGETTING = 0.3
"""The least weight of a new group in an estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A running success rate over `num_groups` groups.

    >>> Estimate(rate=1.0, num_groups=1).after(0.0)
    Estimate(rate=0.5, num_groups=2)
    """

    rate: float = 0.0
    num_groups: int = 0

    def after(self, success: float) -> "Estimate":
        """Return the estimate with one more group, of which a share `success` succeeded."""
        num_groups = self.num_groups + 1
        weight = max(1.0 / num_groups, FORGETTING)
        return Estimate(rate=self.rate + weight * (success - self.rate), num_groups=num_groups)


class Curriculum:
    """Estimates of success rates, by task or by a shared key. Raises ConfigError when a task lacks that key.

    A task whose estimate lies outside a band is passed over, except for a share of the times it comes, so that the
    estimate can change; this depends only on the seed, the position and the estimate. Unseen tasks are drawn. At first
    an estimate is the mean of all groups; later a new group weighs `FORGETTING`, because the policy changes. It learns
    of a group when that leaves the buffer, into a batch or because it is flat: so the state in a checkpoint holds each
    group of the steps before it once, and a group that is trained again is new to it.
    """

    def __init__(self, config: CurriculumConfig, tasks: Iterable[Task], *, seed: int, success_reward: float) -> None:
        self._config = config
        self._success_reward = success_reward
        self._seed = seed
        self._keys: Mapping[str, str] = {task.id: _key_of(task, config.by) for task in tasks}
        self._estimates: dict[str, Estimate] = {}

    def estimate(self, task_id: str) -> Estimate:
        return self._estimates.get(self._keys[task_id], Estimate())

    def draws(self, task: Task, position: int) -> bool:
        """Return whether the task is drawn at this position of the stream; otherwise it is passed over."""
        estimate = self.estimate(task.id)
        is_inside = self._config.low <= estimate.rate <= self._config.high
        if estimate.num_groups == 0 or is_inside:
            return True
        return fraction(f"curriculum/{self._seed}/{position}") < self._config.outside

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Learn from the rewards of a group, at least one. Tasks outside the run's sources are ignored."""
        key = self._keys.get(task_id)
        if key is not None:
            success = statistics.fmean(reward >= self._success_reward for reward in rewards)
            self._estimates[key] = self._estimates.get(key, Estimate()).after(success)

    def state(self) -> JsonObject:
        return {key: [estimate.rate, estimate.num_groups] for key, estimate in self._estimates.items()}

    def restore(self, state: JsonObject) -> None:
        pairs = cast(Mapping[str, tuple[float, int]], state)
        self._estimates = {key: Estimate(rate=rate, num_groups=number) for key, (rate, number) in pairs.items()}


def _key_of(task: Task, by: str | None) -> str:
    if by is None:
        return task.id
    data: Mapping[str, Any] = task.data
    if by not in data:
        raise ConfigError(
            f"tasks.curriculum.by is {by!r}, but the data of task {task.id!r} has no such key; it has {', '.join(data)}"
        )
    return str(data[by])


DRAWN = re.compile(r"g(\d{6,})(?:r(\d+))?")
GIVEN = re.compile(r"t(\d{6,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """A task to roll out, and the id of its group."""

    group_id: str
    task: Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The `number`-th time, from 0, that the group of a position is started.

    >>> Attempt(position=12, number=0).group_id, Attempt(position=12, number=1).group_id
    ('g000012', 'g000012r1')
    """

    position: int
    number: int = 0

    @property
    def group_id(self) -> str:
        return f"g{self.position:06d}" + (f"r{self.number}" if self.number else "")

    @classmethod
    def parse(cls, group_id: str) -> Self | None:
        """Read a group id; None for the group of a task that was not drawn."""
        found = DRAWN.fullmatch(group_id)
        return None if found is None else cls(position=int(found[1]), number=int(found[2] or 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """The draws of earlier processes of the run.

    >>> Past.of({"g000000": False, "g000002": True}, since=0).again
    (Attempt(position=1, number=0), Attempt(position=2, number=1))
    """

    since: int = 0  # the position at which the stream of these tasks begins
    next_position: int = 0
    again: tuple[Attempt, ...] = ()  # cut off, or never begun: to be drawn again
    num_given: int = 0

    @classmethod
    def of(cls, groups: Mapping[str, bool], since: int, *, skips_gaps: bool = False) -> Self:
        """Read the ledger's groups, each with whether it was cut off. Positions before `since` are not drawn again."""
        attempts = [attempt for group_id in groups if (attempt := Attempt.parse(group_id)) is not None]
        latest = {one.position: one for one in sorted(attempts, key=lambda one: (one.position, one.number))}
        next_position = max(latest, default=-1) + 1
        again: list[Attempt] = []
        for position in range(since, next_position):
            attempt = latest.get(position)
            if attempt is not None and groups[attempt.group_id]:
                again.append(Attempt(position=position, number=attempt.number + 1))
            elif attempt is None and not skips_gaps:
                again.append(Attempt(position=position))
        given = [int(found[1]) for group_id in groups if (found := GIVEN.fullmatch(group_id)) is not None]
        return cls(
            since=since,
            next_position=max(since, next_position),
            again=tuple(again),
            num_given=max(given, default=-1) + 1,
        )


class Draws:
    """The draws of one process of a run."""

    def __init__(self, stream: TaskStream, *, curriculum: Curriculum | None = None, past: Past | None = None) -> None:
        past = past or Past()
        self.num_passed_over = 0
        self._stream = stream
        self._curriculum = curriculum
        self._since = past.since
        self._again = deque(past.again)
        self._positions = count(past.next_position)
        self._given = count(past.num_given)

    def draw(self) -> Draw:
        """Return the next task; groups that were cut off come first."""
        while True:
            attempt = self._again.popleft() if self._again else Attempt(position=next(self._positions))
            task = self._stream.at(attempt.position - self._since)
            if attempt.number > 0 or self._curriculum is None or self._curriculum.draws(task, attempt.position):
                return Draw(group_id=attempt.group_id, task=task)
            self.num_passed_over += 1

    def give(self, task: Task) -> Draw:
        """Return a draw for a task of the caller's own, outside the stream."""
        return Draw(group_id=f"t{next(self._given):06d}", task=task)

    def learn(self, task_id: str, rewards: Sequence[float]) -> None:
        """Learn from the rewards of a group that leaves the buffer."""
        if self._curriculum is not None:
            self._curriculum.learn(task_id, rewards)

    def state(self) -> JsonObject:
        """Return the state for a checkpoint."""
        return {} if self._curriculum is None else {"curriculum": self._curriculum.state()}

    def restore(self, state: JsonObject) -> None:
        """Restore the state from a checkpoint; that of a run without a curriculum is empty."""
        if self._curriculum is not None:
            self._curriculum.restore(state.get("curriculum", {}))


TASKS_NOTE = "tasks"
"""The note in the ledger on the tasks of its groups: the stream's fingerprint, and the position where it begins."""


async def open_draws(stream: TaskStream, curriculum: Curriculum | None, ledger: Ledger) -> Draws:
    """Go on where the ledger's groups end. When the tasks have changed, a new stream begins there."""
    groups = await ledger.ask(questions.drawn_groups)
    skips_gaps = curriculum is not None
    note: Mapping[str, Any] | None = await ledger.ask(questions.note, TASKS_NOTE)
    since = note["since"] if note else 0
    if note and note["fingerprint"] != stream.fingerprint():
        since = Past.of(groups, 0).next_position
        logger.warning(
            "the tasks, their order or their weights are not those that this run began with: the new ones are drawn "
            "from now on, and groups of the old ones that were cut off are not drawn again"
        )
    await ledger.set_note(TASKS_NOTE, {"fingerprint": stream.fingerprint(), "since": since})
    return Draws(stream, curriculum=curriculum, past=Past.of(groups, since, skips_gaps=skips_gaps))
