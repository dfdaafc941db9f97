"""The groups that a trainer will consume, from their first session until they are leased or given up.

::

    admit ─▶ (a session starts ─▶ ends)* ─▶ ready ─▶ leased, or given up: nothing of it can be trained

A group is admitted as a whole: its first session reserves room for all siblings under the staleness bound. It is ready
when all of them have ended with their rewards. What is missing (a sibling that never starts, a late reward) is waited
for so long, counted from the last thing that happened to the group. Pure accounting: no clock, no ledger.

Which version labels are the trainer's own, and what step they stand for. Pure.

A label `incarnation:step` names weights of one run. Its step can be compared with the trainer's only where the
incarnation is one of the trainer's: of weights that it never had nobody can say how old they are to it.

The sibling sessions of one task, as the trainer's side of a gateway sees them. Pure: no clock, no ledger.

What a closed trajectory is to a trainer: whether it can be trained, how old it is, what a lease says of it. Pure.

The staleness bound at the door of a gateway: whether so many answers more may be started. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.gateway.control import RewardBook, RewardRequest
from areal_agent.ledger.reads import Lease
from areal_agent.ledger.writes import FATE_OF_STATUS
from areal_agent.staleness import is_stale, oldest_step, room
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, JsonObject, Rewards, Status, Trajectory, TrajectoryGroup, WeightVersion

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A session that has ended and could be trained: the weights that sampled it, and whether it was rewarded."""

    session_id: str
    versions: frozenset[WeightVersion]
    has_reward: bool

    def oldest(self, labels: Labels) -> int:
        """The step of its oldest token, as the trainer counts."""
        return min(map(labels.step_of, self.versions))

    def newest(self, labels: Labels) -> int:
        return max(map(labels.step_of, self.versions))


@dataclass(kw_only=True, slots=True)
class Group:
    """The sibling sessions of one task. `size` answers are reserved for it, failed ones included."""

    id: str
    size: int
    started_step: int  # the version that served when it was admitted
    changed_s: float  # when the last thing happened to it
    sessions: list[str] = field(default_factory=list[str])  # that have started
    running: set[str] = field(default_factory=set[str])
    waiting: dict[str, Waiting] = field(default_factory=dict[str, Waiting])

    @property
    def num_started(self) -> int:
        return len(self.sessions)

    @property
    def is_over(self) -> bool:
        """All siblings have started and ended."""
        return not self.running and self.num_started == self.size

    def oldest(self, labels: Labels) -> int:
        return min(one.oldest(labels) for one in self.waiting.values())

    @property
    def lacks_nothing(self) -> bool:
        """It is over, and those that can be trained have a reward."""
        return self.is_over and all(one.has_reward for one in self.waiting.values())


def why_untrainable(trajectory: Trajectory) -> Drop | None:
    """The fate of a trajectory that nobody needs to wait for; None when it can be trained, once it has a reward."""
    if not trajectory.sampled_steps():
        return FATE_OF_STATUS.get(trajectory.status, Drop.FILTERED)
    if trajectory.status in (Status.COMPLETED, Status.MISSING_REWARD):
        return None
    return FATE_OF_STATUS[trajectory.status]


def as_waiting(trajectory: Trajectory) -> Waiting:
    """Raises ValueError when nothing was sampled in it."""
    return Waiting(
        session_id=trajectory.session_id,
        versions=trajectory.sampled_versions(),
        has_reward=not trajectory.rewards.is_missing,
    )


def leases_of(trajectories: Iterable[Trajectory]) -> list[Lease]:
    """What to lease of them. Takes milliseconds a trajectory: call it in a thread."""
    return [Lease.of(one, sum(int(record.loss_mask.sum()) for record in token_records(one))) for one in trajectories]


def in_groups(trajectories: Iterable[Trajectory]) -> tuple[TrajectoryGroup, ...]:
    """The same trajectories by group, the oldest tokens first; one order, however they come."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda one: one.session_id):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    return tuple(
        TrajectoryGroup(group_id=group_id, task_id=members[0].task_id, trajectories=tuple(members))
        for group_id, members in sorted(groups.items(), key=lambda item: (min(map(oldest_step, item[1])), item[0]))
    )


def with_reward(trajectory: Trajectory, request: RewardRequest) -> Rewards:
    """What it has earned with a late reward. Raises RequestError for a completion that it has not."""
    book = RewardBook(trajectory.rewards)
    book.take(request, {one.id for turn in trajectory.turns for one in turn.completions})
    return book.rewards()


RETRY_AFTER_S = 1
"""When whoever was refused at the bound should ask again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The staleness bound: B answers (rollouts) a train step, eta versions."""

    batch_answers: int
    max_staleness: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the trainer is: version `published` serves, and batches up to `leased` have been handed out.

    A batch counts as B answers at least, so that a trainer that takes fewer does not widen the bound. What one had
    beyond B counts until its step is published: until then it would let more in beside the version that serves. Counted
    for ever it would use the bound up, and nothing would be let in any more.
    """

    published: int = 0
    leased: int = 0
    surplus: tuple[tuple[int, int], ...] = ()  # (step, answers beyond B) of steps not yet published

    @classmethod
    def read(cls, fields: JsonObject) -> Self:
        """The inverse of what JSON makes of it."""
        surplus = tuple((step, answers) for step, answers in fields.get("surplus", ()))
        return cls(published=fields["published"], leased=fields["leased"], surplus=surplus)

    def to_version(self, step: int) -> Self:
        """Version `step` serves."""
        surplus = tuple(one for one in self.surplus if one[0] > step)
        return replace(self, published=step, leased=max(step, self.leased), surplus=surplus)

    def to_batch(self, step: int, num_answers: int, bound: Bound | None) -> Self:
        """A batch of so many answers is handed out for `step`."""
        beyond = 0 if bound is None else num_answers - bound.batch_answers
        surplus = (*self.surplus, (step, beyond)) if beyond > 0 else self.surplus
        return replace(self, leased=step, surplus=surplus)

    def consumed(self, bound: Bound) -> int:
        """Answers that the trainer has had."""
        return max(self.leased, self.published) * bound.batch_answers + sum(answers for _, answers in self.surplus)


def capacity(bound: Bound, progress: Progress, under_way: int) -> int:
    """How many answers may be admitted beside those that run or wait to be leased."""
    return room(
        step=progress.published,
        max_staleness=bound.max_staleness,
        batch_answers=bound.batch_answers,
        consumed=progress.consumed(bound),
        under_way=under_way,
    )


def require_possible(size: int, bound: Bound) -> None:
    """Raises RequestError (400) for a group that never fits."""
    most = (bound.max_staleness + 1) * bound.batch_answers
    if size > most:
        raise RequestError(
            f"group_size is {size}; the staleness bound never admits more than {most} answers at once "
            f"(max_staleness {bound.max_staleness}, {bound.batch_answers} answers a train step)",
            param="group_size",
            code="invalid_value",
        )


def require_room(size: int, bound: Bound, progress: Progress, *, num_running: int, num_finished: int) -> None:
    """Raises RequestError (429) unless `size` answers more may be started now."""
    left = capacity(bound, progress, num_running + num_finished)
    if left < size:
        raise RequestError(
            f"the staleness bound is reached: {num_running} answers run and {num_finished} wait to be trained, which "
            f"leaves room for {max(0, left)} of the {size} asked for at weight version {progress.published}; ask again "
            f"when the trainer has published version {progress.published + 1}",
            status=429,
            code="staleness_bound",
            retry_after_s=RETRY_AFTER_S,
        )


class Groups:
    """All groups that are neither leased nor given up, and the bound on how many answers they may be."""

    def __init__(self, *, wait_s: float, bound: Bound | None = None, progress: Progress | None = None) -> None:
        self.bound = bound  # None: no trainer has named one yet, and everything is admitted
        self.progress = progress or Progress()
        self.labels = Labels()  # of the trainer's weights
        self._wait_s = wait_s
        self._groups: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}  # by session
        self._leased: set[str] = set()  # groups of which something is leased or trained
        self._refused_size: int | None = None  # of the group that was kept out at the bound, unless one came in since

    # -------------------------------------------------------------------------------------- at the door

    @property
    def num_running(self) -> int:
        """Answers of groups that have not all of their sessions behind them."""
        return self._num_answers(group for group in self._groups.values() if not group.is_over)

    @property
    def num_finished(self) -> int:
        """Answers of groups that wait to be leased."""
        return self._num_answers(self._groups.values()) - self.num_running

    @property
    def capacity(self) -> int | None:
        """How many more answers may be admitted now; None without a bound."""
        if self.bound is None:
            return None
        return capacity(self.bound, self.progress, self.num_running + self.num_finished)

    def start(self, session_id: str, group_id: str, size: int | None, now_s: float) -> None:
        """Admit a session: a sibling of an admitted group always, the first of a group when all of it fits.

        Raises RequestError: 429 at the bound, 409 when the group is full or leased, 400 for a size that cannot be.
        """
        self._require_unleased(group_id)
        group = self._groups.get(group_id)
        if group is None:
            group = self._admit(group_id, size or 1, now_s)
        self._join(group, size)
        group.sessions.append(session_id)
        group.running.add(session_id)
        group.changed_s = now_s
        self._group_of[session_id] = group_id

    def withdraw(self, session_id: str) -> None:
        """Undo `start` of a session that could not be opened."""
        group = self._groups[self._group_of.pop(session_id)]
        group.running.discard(session_id)
        group.sessions.remove(session_id)
        if not group.sessions:
            self._remove(group)

    # ------------------------------------------------------------------------------------ after the end

    def end(self, session_id: str, waiting: Waiting | None, now_s: float) -> None:
        """A session has ended; with nothing to train (None) its siblings go on without it."""
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
        """Take back what the ledger has of a group: the sessions that have ended, and those of them that wait."""
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

    def restore_leased(self, group_ids: Iterable[str]) -> None:
        """Exactly these groups have something that is leased or trained."""
        self._leased = set(group_ids)

    def size_of_first(self, session_id: str) -> int | None:
        """How many siblings the group is to have, if this session began it."""
        group = self._group(session_id)
        return group.size if group is not None and group.sessions[0] == session_id else None

    def is_running(self, session_id: str) -> bool:
        """Whether it was admitted and has not ended."""
        group = self._group(session_id)
        return group is not None and session_id in group.running

    def is_waiting(self, session_id: str) -> bool:
        """Whether it has ended and may yet be leased: it may still be rewarded."""
        group = self._group(session_id)
        return group is not None and session_id in group.waiting

    def reward(self, session_id: str, now_s: float) -> None:
        """A reward has come for a session that waits."""
        group = self._group(session_id)
        if group is not None and session_id in group.waiting:
            one = group.waiting[session_id]
            group.waiting[session_id] = replace(one, has_reward=True)
            group.changed_s = now_s

    # ----------------------------------------------------------------------------------- for the trainer

    def ready(self, now_s: float) -> tuple[Group, ...]:
        """The groups that could be leased now, the oldest tokens first."""
        found = [group for group in self._groups.values() if self._is_ready(group, now_s)]
        return tuple(sorted(found, key=lambda group: (group.oldest(self.labels), group.id)))

    def is_stuck(self, now_s: float) -> bool:
        """Whether only a lease can make anything happen: all groups are ready, and no further one is let in.

        The next group is taken to be as large as the one that was refused last, or as the smallest that is here.
        """
        capacity = self.capacity
        if capacity is None or not self._groups:
            return False
        next_size = self._refused_size or min(group.size for group in self._groups.values())
        return capacity < next_size and all(self._is_ready(group, now_s) for group in self._groups.values())

    def unrewarded(self, now_s: float) -> tuple[str, ...]:
        """Sessions whose reward has been waited for long enough."""
        return tuple(
            one.session_id
            for group in self._groups.values()
            if not group.running and self._has_waited(group, now_s)
            for one in group.waiting.values()
            if not one.has_reward
        )

    def stale(self, step: int) -> tuple[str, ...]:
        """Sessions that wait and are beyond the bound for train step `step`.

        So is one that another trainer's weights have sampled. Where the trainer has named no incarnation, a token of a
        later version than the step begins with shows them.
        """
        return tuple(
            one.session_id
            for group in self._groups.values()
            for one in group.waiting.values()
            if self._is_beyond(one, step)
        )

    def stragglers(self, step: int) -> tuple[str, ...]:
        """Groups with running sessions that would be too stale after train step `step`."""
        if self.bound is None:
            return ()
        limit = self.bound.max_staleness
        return tuple(one.id for one in self._groups.values() if one.running and step - one.started_step > limit)

    def next_expiry_s(self, now_s: float) -> float | None:
        """When the waiting for something that is missing will next be over."""
        times = [
            group.changed_s + self._wait_s
            for group in self._groups.values()
            if not group.running and not group.lacks_nothing and not self._has_waited(group, now_s)
        ]
        return min(times, default=None)

    def give_up(self, session_ids: Iterable[str], now_s: float) -> None:
        """Sessions that were dropped; a group of which nothing is left gives its room back."""
        for session_id in session_ids:
            group = self._group(session_id)
            if group is not None:
                group.waiting.pop(session_id, None)
                self._forget_if_empty(group, now_s)

    def lease(self, session_ids: Iterable[str]) -> None:
        """Sessions that were leased. A group that has let another sibling in meanwhile goes on with that."""
        for session_id in session_ids:
            group = self._group(session_id)
            if group is not None:
                self._leased.add(group.id)
                group.waiting.pop(session_id, None)
                if not (group.running or group.waiting):
                    self._remove(group)

    def give_up_unstarted(self, now_s: float) -> None:
        """Forget groups that have nothing to train and whose missing siblings have been waited for long enough."""
        for group in tuple(self._groups.values()):
            self._forget_if_empty(group, now_s)

    # ------------------------------------------------------------------------------------------ internals

    def _admit(self, group_id: str, size: int, now_s: float) -> Group:
        if self.bound is not None:
            require_possible(size, self.bound)
            self._refused_size = size  # unless there is room
            require_room(size, self.bound, self.progress, num_running=self.num_running, num_finished=self.num_finished)
        self._refused_size = None
        group = Group(id=group_id, size=size, started_step=self.progress.published, changed_s=now_s)
        self._groups[group_id] = group
        return group

    def _require_unleased(self, group_id: str) -> None:
        if group_id in self._leased:
            raise RequestError(
                f"group {group_id!r} is leased or trained already, and takes no further sibling; name another group_id",
                status=409,
                param="group_id",
                code="group_leased",
            )

    def _join(self, group: Group, size: int | None) -> None:
        """Check that the group has a place left for one more sibling."""
        if size is not None and size != group.size:
            raise RequestError(
                f"group_size is {size}, but group {group.id!r} was started with {group.size}; say that, or nothing, or "
                "choose another group_id",
                param="group_size",
                code="invalid_value",
            )
        if group.num_started >= group.size:
            raise RequestError(
                f"group {group.id!r} has its {group.size} session(s) already; name its group_size with the first of "
                "them, or another group_id",
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
