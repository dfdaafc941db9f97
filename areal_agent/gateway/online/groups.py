"""The groups that a trainer will consume, from their first session until they are leased or dropped.

::

    admit ─▶ (a session starts ─▶ ends)* ─▶ ready ─▶ leased, or given up: nothing of it can be trained

A group is admitted as a whole: its first session reserves room for all siblings under the staleness bound. It is ready
when all of them have ended with their rewards. It waits a limited time for what is missing (a sibling that never
starts, a late reward), counted from its last change.

A version label `incarnation:step` names weights of one run. `Labels` knows which incarnations are the trainer's own:
only their steps can be compared with its steps. Nothing here reads a clock; times are arguments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.gateway.sessions import session_exists
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.writes import FATE_OF_STATUS
from areal_agent.staleness import is_stale, oldest_step, room
from areal_agent.tokens.loss_rule import LossRule
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, Status, Trajectory, TrajectoryGroup, WeightVersion

FOREIGN = -(2**30)
"""The step counted for another trainer's weights: beyond every staleness bound."""

RETRY_AFTER_S = 1
"""Seconds until a client that was refused at the staleness bound should ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The trainer's incarnations. If it has named none, all labels count as its own.

    >>> labels = Labels(incarnations=(0, 3))
    >>> [labels.step_of(WeightVersion.parse(text)) for text in ("0:7", "3:5")]
    [7, 5]
    >>> labels.step_of(WeightVersion.parse("1:7")) == FOREIGN
    True
    """

    incarnations: tuple[int, ...] = ()

    def step_of(self, version: WeightVersion) -> int:
        """Return the step that counts for staleness; for the trainer's own weights also one that a crash undid."""
        is_own = not self.incarnations or version.incarnation in self.incarnations
        return version.step if is_own else FOREIGN

    def naming(self, incarnation: int) -> Self:
        """Return these labels with one more incarnation."""
        if incarnation in self.incarnations:
            return self
        return replace(self, incarnations=(*self.incarnations, incarnation))


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """An ended session that could be trained: the weights that sampled it, and whether it has a reward."""

    session_id: str
    versions: frozenset[WeightVersion]
    has_reward: bool

    def oldest(self, labels: Labels) -> int:
        """Return the step of its oldest token, as the trainer counts."""
        return min(map(labels.step_of, self.versions))

    def newest(self, labels: Labels) -> int:
        return max(map(labels.step_of, self.versions))


@dataclass(kw_only=True, slots=True)
class Group:
    """The sibling sessions of one task. `size` answers are reserved for it, including failed ones."""

    id: str
    size: int
    started_step: int  # the version that served when it was admitted
    changed_s: float  # the time of its last change
    sessions: list[str] = field(default_factory=list[str])  # all that have started
    running: set[str] = field(default_factory=set[str])
    waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])

    @property
    def num_started(self) -> int:
        return len(self.sessions)

    @property
    def is_over(self) -> bool:
        """True when all siblings have started and ended."""
        return not self.running and self.num_started == self.size

    def oldest(self, labels: Labels) -> int:
        return min(one.oldest(labels) for one in self.waiting.values())

    @property
    def lacks_nothing(self) -> bool:
        """True when it is over and every session that can be trained has a reward."""
        return self.is_over and all(one.has_reward for one in self.waiting.values())


def why_untrainable(trajectory: Trajectory) -> Drop | None:
    """Return why a trajectory can never be trained; None if it can once it has a reward."""
    if not trajectory.sampled_steps():
        return FATE_OF_STATUS.get(trajectory.status, Drop.FILTERED)
    if trajectory.status in (Status.COMPLETED, Status.MISSING_REWARD):
        return None
    return FATE_OF_STATUS[trajectory.status]


def as_waiting(trajectory: Trajectory) -> Waiting:
    """Describe a session that waits to be trained. Raises ValueError when nothing was sampled in it."""
    return Waiting(
        session_id=trajectory.session_id,
        versions=trajectory.sampled_versions(),
        has_reward=not trajectory.rewards.is_missing,
    )


def leases_of(trajectories: Iterable[Trajectory], rule: LossRule) -> list[Lease]:
    """Make the leases of trajectories. It takes milliseconds for each: call it in a thread."""
    return [
        Lease.of(one, sum(int(record.loss_mask.sum()) for record in token_records(one, rule))) for one in trajectories
    ]


def in_groups(trajectories: Iterable[Trajectory]) -> tuple[TrajectoryGroup, ...]:
    """Group trajectories, the groups with the oldest tokens first; the order of the input does not matter."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda one: one.session_id):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return tuple(
        TrajectoryGroup(group_id=group_id, task_id=members[0].task_id, trajectories=tuple(members))
        for group_id, members in sorted(groups.items(), key=lambda item: (min(map(oldest_step, item[1])), item[0]))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The staleness bound: B answers (rollouts) per train step, eta versions."""

    batch_answers: int
    max_staleness: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The trainer's progress: version `published` serves, and batches up to `leased` have been leased.

    A batch counts as at least B answers, so that a trainer that takes fewer does not widen the bound. Answers beyond B
    count until the batch's step is published. Before that, ignoring them would admit more against the serving version;
    counted for ever, they would use up the bound until nothing is admitted.
    """

    published: int = 0
    leased: int = 0
    surplus: tuple[tuple[int, int], ...] = ()  # (step, answers beyond B) of steps not yet published

    def to_version(self, step: int) -> Self:
        """Return the progress when version `step` serves."""
        surplus = tuple(one for one in self.surplus if one[0] > step)
        return replace(self, published=step, leased=max(step, self.leased), surplus=surplus)

    def to_batch(self, step: int, num_answers: int, bound: Bound | None) -> Self:
        """Return the progress when a batch of `num_answers` is leased for `step`."""
        beyond = 0 if bound is None else num_answers - bound.batch_answers
        surplus = (*self.surplus, (step, beyond)) if beyond > 0 else self.surplus
        return replace(self, leased=step, surplus=surplus)

    def consumed(self, bound: Bound) -> int:
        """Return the number of answers that the trainer has consumed."""
        return max(self.leased, self.published) * bound.batch_answers + sum(answers for _, answers in self.surplus)


class Groups:
    """All groups that are neither leased nor given up, and the bound on their number of answers."""

    def __init__(self, *, wait_s: float, bound: Bound | None = None, progress: Progress | None = None) -> None:
        self.bound = bound  # None until a trainer names one: everything is admitted
        self.progress = progress or Progress()
        self.labels = Labels()  # of the trainer's weights
        self._wait_s = wait_s
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}  # by session
        self.leased: set[str] = set()  # groups with something leased or trained
        self._refused_size: int | None = None  # of the last group refused at the bound; None once one is admitted

    # -------------------------------------------------------------------------------------- at the door

    @property
    def num_running(self) -> int:
        """The number of answers of groups in which not all sessions have ended."""
        return self._num_answers(group for group in self._groups.values() if not group.is_over)

    @property
    def num_finished(self) -> int:
        """The number of answers of groups that wait to be leased."""
        return self._num_answers(self._groups.values()) - self.num_running

    @property
    def capacity(self) -> int | None:
        """The number of answers that may be admitted now; None without a bound."""
        if self.bound is None:
            return None
        return room(
            step=self.progress.published,
            max_staleness=self.bound.max_staleness,
            batch_answers=self.bound.batch_answers,
            consumed=self.progress.consumed(self.bound),
            under_way=self._num_answers(self._groups.values()),
        )

    def start(self, session_id: str, group_id: str, size: int | None, now_s: float) -> None:
        """Admit a session: any sibling of an admitted group, or the first of a group that fits as a whole.

        Raises RequestError: 429 at the bound, 409 when the group is full or leased, or there is such a session, 400 for
        an impossible size.
        """
        if session_id in self._group_of:  # it has ended and waits
            raise session_exists(session_id)
        self._require_unleased(group_id)
        if group_id in self._groups:
            self._forget_if_empty(self._groups[group_id], now_s)  # it may have been awaited in vain
        group = self._groups.get(group_id)
        if group is None:
            group = self._admit(group_id, size or 1, now_s)
        self._join(group, size)
        group.sessions.append(session_id)
        group.running.add(session_id)
        group.changed_s = now_s
        self._group_of[session_id] = group_id

    def withdraw(self, session_id: str) -> None:
        """Undo `start` for a session that could not be opened."""
        group = self._groups[self._group_of.pop(session_id)]
        group.running.discard(session_id)
        group.sessions.remove(session_id)
        if not group.sessions:
            self._remove(group)

    # ------------------------------------------------------------------------------------ after the end

    def end(self, session_id: str, waiting: Waiting | None, now_s: float) -> None:
        """Note that a session has ended. With nothing to train (`waiting` is None) its siblings go on without it."""
        group = self._group(session_id)
        if group is None:
            return
        group.running.discard(session_id)
        group.changed_s = now_s
        if waiting is not None:
            group.waiting[session_id] = waiting
        self._forget_if_empty(group, now_s)

    def restore(
        self, group_id: str, *, size: int, ended: Iterable[str], waiting: Sequence[Waiting], now_s: float
    ) -> None:
        """Restore a group from the ledger: its ended sessions, and those among them that wait."""
        group = self._groups.get(group_id)
        if group is None:
            oldest = min(one.oldest(self.labels) for one in waiting)
            group = self._groups[group_id] = Group(id=group_id, size=size, started_step=oldest, changed_s=now_s)
        for session_id in ended:
            if session_id not in group.sessions:
                group.sessions.append(session_id)
                self._group_of[session_id] = group_id
        group.size = max(group.size, group.num_started)
        group.waiting.update((one.session_id, one) for one in waiting)

    def size_of_first(self, session_id: str) -> int | None:
        """Return the size of the group that this session began; None if it did not begin one."""
        group = self._group(session_id)
        return group.size if group is not None and group.sessions[0] == session_id else None

    def is_running(self, session_id: str) -> bool:
        """Return whether the session was admitted and has not ended."""
        group = self._group(session_id)
        return group is not None and session_id in group.running

    def is_waiting(self, session_id: str) -> bool:
        """Return whether the session has ended and may still be leased and rewarded."""
        group = self._group(session_id)
        return group is not None and session_id in group.waiting

    def reward(self, session_id: str, now_s: float) -> None:
        """Note the reward of a waiting session."""
        group = self._group(session_id)
        if group is not None and session_id in group.waiting:
            one = group.waiting[session_id]
            group.waiting[session_id] = replace(one, has_reward=True)
            group.changed_s = now_s

    # ----------------------------------------------------------------------------------- for the trainer

    def ready(self, now_s: float) -> tuple[Group, ...]:
        """Return the groups that could be leased now, those with the oldest tokens first."""
        found = [group for group in self._groups.values() if self._is_ready(group, now_s)]
        return tuple(sorted(found, key=lambda group: (group.oldest(self.labels), group.id)))

    def is_stuck(self, now_s: float) -> bool:
        """Return whether only a lease can change anything: all groups are ready and no further one is admitted.

        The next group is assumed to have the size of the last one refused, else of the smallest one here.
        """
        capacity = self.capacity
        if capacity is None or not self._groups:
            return False
        next_size = self._refused_size or min(group.size for group in self._groups.values())
        return capacity < next_size and all(self._is_ready(group, now_s) for group in self._groups.values())

    def unrewarded(self, now_s: float) -> tuple[str, ...]:
        """Return the sessions whose reward has been awaited for long enough."""
        return tuple(
            one.session_id
            for group in self._groups.values()
            if not group.running and self._has_waited(group, now_s)
            for one in group.waiting.values()
            if not one.has_reward
        )

    def stale(self, step: int) -> tuple[str, ...]:
        """Return the waiting sessions that are beyond the bound for train step `step`.

        Sessions sampled by another trainer's weights are among them. If the trainer named no incarnation, those are
        the sessions with a token of a later version than the step starts from.
        """
        return tuple(
            one.session_id
            for group in self._groups.values()
            for one in group.waiting.values()
            if self._is_beyond(one, step)
        )

    def stragglers(self, step: int) -> tuple[str, ...]:
        """Return the groups with running sessions that would be too stale after train step `step`."""
        if self.bound is None:
            return ()
        limit = self.bound.max_staleness
        return tuple(one.id for one in self._groups.values() if one.running and step - one.started_step > limit)

    def next_expiry_s(self, now_s: float) -> float | None:
        """Return when the next wait for something missing is over; None if there is none."""
        times = [
            group.changed_s + self._wait_s
            for group in self._groups.values()
            if not group.running and not group.lacks_nothing and not self._has_waited(group, now_s)
        ]
        return min(times, default=None)

    def give_up(self, session_ids: Iterable[str], now_s: float) -> None:
        """Remove dropped sessions. A group with nothing left gives its room back."""
        for session_id in session_ids:
            group = self._group(session_id)
            if group is not None:
                group.waiting.pop(session_id, None)
                self._forget_if_empty(group, now_s)

    def lease(self, session_ids: Iterable[str]) -> None:
        """Remove leased sessions. A group that admitted another sibling meanwhile goes on with it."""
        for session_id in session_ids:
            group = self._group(session_id)
            if group is not None:
                self.leased.add(group.id)
                group.waiting.pop(session_id, None)
                if not (group.running or group.waiting):
                    self._remove(group)

    def give_up_unstarted(self, now_s: float) -> None:
        """Forget groups with nothing to train whose missing siblings have been awaited for long enough."""
        for group in tuple(self._groups.values()):
            self._forget_if_empty(group, now_s)

    # ------------------------------------------------------------------------------------------ internals

    def _admit(self, group_id: str, size: int, now_s: float) -> Group:
        if self.bound is not None:
            self._require_possible(size, self.bound)
            self._refused_size = size  # reset below when there is room
            self.give_up_unstarted(now_s)
            self._require_room(size)
        self._refused_size = None
        group = Group(id=group_id, size=size, started_step=self.progress.published, changed_s=now_s)
        self._groups[group_id] = group
        return group

    def _require_possible(self, size: int, bound: Bound) -> None:
        most = (bound.max_staleness + 1) * bound.batch_answers
        if size > most:
            raise RequestError(
                f"group_size is {size}; the staleness bound never admits more than {most} answers at once "
                f"(max_staleness {bound.max_staleness}, {bound.batch_answers} answers a train step)",
                param="group_size",
                code="invalid_value",
            )

    def _require_room(self, size: int) -> None:
        left = self.capacity
        if left is not None and left < size:
            published = self.progress.published
            raise RequestError(
                f"the staleness bound is reached: {self.num_running} answers run and {self.num_finished} wait to be "
                f"trained, which leaves room for {max(0, left)} of the {size} asked for at weight version {published}; "
                f"ask again when the trainer has published version {published + 1}",
                status=429,
                code="staleness_bound",
                retry_after_s=RETRY_AFTER_S,
            )

    def _require_unleased(self, group_id: str) -> None:
        if group_id in self.leased:
            raise RequestError(
                f"group {group_id!r} is leased or trained already and accepts no more siblings; "
                "choose another group_id",
                status=409,
                param="group_id",
                code="group_leased",
            )

    def _join(self, group: Group, size: int | None) -> None:
        """Check that the group has a place for one more sibling."""
        if size is not None and size != group.size:
            raise RequestError(
                f"group_size is {size}, but group {group.id!r} was started with {group.size}; give that, leave it out, "
                "or choose another group_id",
                param="group_size",
                code="invalid_value",
            )
        if group.num_started >= group.size:
            raise RequestError(
                f"group {group.id!r} has its {group.size} session(s) already; give group_size with the first of "
                "them, or choose another group_id",
                status=409,
                param="group_id",
                code="group_full",
            )

    def _group(self, session_id: str) -> Group | None:
        group_id = self._group_of.get(session_id)
        return None if group_id is None else self._groups[group_id]

    def _is_ready(self, group: Group, now_s: float) -> bool:
        if group.running or not group.waiting:
            return False
        return group.lacks_nothing or self._has_waited(group, now_s)

    def _is_beyond(self, one: Waiting, step: int) -> bool:
        oldest = one.oldest(self.labels)
        if oldest == FOREIGN:
            return True
        if self.bound is None:
            return False
        is_of_others = not self.labels.incarnations and one.newest(self.labels) >= step
        return is_of_others or is_stale(oldest, step, self.bound.max_staleness)

    def _has_waited(self, group: Group, now_s: float) -> bool:
        return now_s - group.changed_s >= self._wait_s

    def _forget_if_empty(self, group: Group, now_s: float) -> None:
        is_waited_for = group.num_started < group.size and not self._has_waited(group, now_s)
        if not (group.running or group.waiting or is_waited_for):
            self._remove(group)

    def _remove(self, group: Group) -> None:
        del self._groups[group.id]
        for session_id in group.sessions:
            del self._group_of[session_id]

    @staticmethod
    def _num_answers(groups: Iterable[Group]) -> int:
        return sum(group.size for group in groups)
