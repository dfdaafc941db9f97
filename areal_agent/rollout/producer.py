"""The producing half of a run: admits tasks while the bound allows, and hands out batches. It owns the admit loop.

    draws ───▶ admit loop ──▶ one task a group ──▶ buffer ──▶ take ──▶ (trainer)
                  ▲                 │ all failed, or flat: capacity back  │
                  └── publish(step): the bound moves                      └── too stale: dropped, capacity back

The admit loop waits for room under the bound and for free rollout slots; a finished group, a taken batch and a
published version unblock it. `take` waits for enough groups, and for stragglers at the bound. A trajectory whose
staleness (staleness.py) is more than `max_staleness` is not trained.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from areal_agent.algorithms.config import AlgorithmConfig
from areal_agent.algorithms.credit import TOLERANCE, earn_alike, reward_parts, with_causal_credit, with_parts
from areal_agent.errors import RolloutsFailing
from areal_agent.ledger import questions
from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.ledger import Ledger
from areal_agent.ledger.writes import FATE_OF_STATUS
from areal_agent.rollout.config import ALTERED
from areal_agent.rollout.draws import Draw, Draws
from areal_agent.rollout.runner import RolloutSpec, rollout_seed
from areal_agent.staleness import Admission, is_stale, oldest_step, without_stale_tokens
from areal_agent.tokens.loss_rule import LossRule
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, RolloutBatch, SessionPurpose, Status, Task, TokenRecord, Trajectory, TrajectoryGroup

Result = TypeVar("Result")
Spec = TypeVar("Spec")
logger = logging.getLogger(__name__)


def eval_seed(run_seed: int, task: Task, number: int, sample: int, *names: str) -> int:
    """Return the seed of one answer of an evaluation: of a task, its number and the sample's, whatever the weights."""
    return rollout_seed(run_seed, "eval", str(number), task.id, *[str(sample)] * (sample > 0), *names)


def sibling_specs(group_id: str, task: Task, group_size: int, run_seed: int) -> tuple[RolloutSpec, ...]:
    """Return the specs of the G rollouts of one training group, each with a seed of its own."""
    return tuple(
        RolloutSpec(
            session_id=f"{group_id}-{index}",
            group_id=group_id,
            task=task,
            seed=rollout_seed(run_seed, group_id, str(index)),
            purpose=SessionPurpose.TRAIN,
        )
        for index in range(group_size)
    )


async def run_all(run: Callable[[Spec], Coroutine[Any, Any, Result]], specs: Sequence[Spec]) -> tuple[Result, ...]:
    """Run rollouts at once. When one of them raises (the gateway is gone), cancel the others and raise that."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(spec)) for spec in specs]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in running)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyGroup:
    """A finished group with at least one trajectory that can be trained; `trainable` are those trajectories."""

    group: TrajectoryGroup
    trainable: tuple[Trajectory, ...]

    @property
    def oldest(self) -> int:
        """The step of the oldest sampled token in the group: older groups are consumed first."""
        return min(oldest_step(one) for one in self.trainable)

    @property
    def least_stale(self) -> int:
        """The step of its freshest trajectory's oldest token: when that is beyond the bound, so is the group."""
        return max(oldest_step(one) for one in self.trainable)


@dataclass(slots=True)
class DynamicSampling:
    """Decides which finished groups are flat, and counts them: groups whose rollouts all earn alike teach nothing.

    DAPO (Yu et al. 2025, arXiv 2503.14476), section 3.2: when all rewards of a group are equal, all its advantages are
    zero, and the batch is smaller than it seems. Such a group is dropped (`filtered`), its capacity given back, and the
    next task drawn in its place. When too many groups in a row are flat, the run ends: the model always succeeds or
    never.

    "Alike" is judged as the advantages within a group judge it (algorithms/credit.py): within each role, from every
    turn on, all rollouts with a token to train earn the same. So rollouts with equal totals differ when they earned
    them in other turns or, with a discount, sooner; rewards of rollouts without a token to train do not count. A
    divergence paid in the reward is computed in the trainer and not seen here, and a user's own advantage is assumed to
    compare as ours.
    """

    max_flat_groups: int
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rule: LossRule = field(default_factory=LossRule)
    num_flat: int = 0
    in_a_row: int = 0
    last_flat: str = ""
    is_altered: bool = False  # the last one was flat because of altered tokens

    def replaces(self, group: Sequence[Trajectory]) -> bool:
        """Return whether these completed siblings have no spread in reward in any role. Call it once per group."""
        records = [record for one in group for record in token_records(one, self.rule)]
        trainable = {record.session_id for record in records if record.loss_mask.any()}
        paid, rewards = with_parts(  # as the trainer will reward them
            [record for record in records if record.session_id in trainable],
            {one.session_id: one.rewards.total for one in group},
            {one.session_id: reward_parts(one, self.algorithm) for one in group},
            self.algorithm.reward_parts,
        )
        discount, compares_turns = self.algorithm.discount, self.algorithm.step_group_weight > 0
        alike: list[str] = []  # what is told of each role with rollouts to compare
        by_role: defaultdict[str, list[TokenRecord]] = defaultdict(list)
        for record in with_causal_credit(paid, discount):
            by_role[record.group_id].append(record)
        for of_role in by_role.values():
            sessions = {record.session_id for record in of_role}
            if len(sessions) < (1 if compares_turns else 2):
                continue
            if not earn_alike(of_role, discount, TOLERANCE, compares_turns=compares_turns):
                self.in_a_row = 0
                return False
            alike.append(f"{len(sessions)} rollouts, each with reward {rewards[of_role[0].session_id]:g}")
        self.in_a_row += 1
        self.num_flat += 1
        self.is_altered = any(self.rule.drop_of(one) is Drop.ALTERED for one in group)
        what = " and ".join(alike) or f"{len(trainable)} of {len(group)} rollouts had a token to train"
        self.last_flat = f"task {group[0].task_id!r}: {what}"
        return True

    @property
    def is_exhausted(self) -> bool:
        return self.in_a_row >= self.max_flat_groups

    def describe(self) -> str:
        """Return why the run ends once `is_exhausted`."""
        cause = (
            "The model always succeeds on these tasks or never does: give it harder or easier ones, see whether the "
            "reward can differ, or set algorithm.dynamic_sampling to false (rollout.max_flat_groups is the limit)"
        )
        if self.is_altered:
            cause = f"The tokens of the others are {ALTERED}"
        return f"{self.in_a_row} groups in a row had no spread in reward, the last was {self.last_flat}. {cause}"


RunGroup = Callable[[str, Task], Coroutine[Any, Any, TrajectoryGroup]]
"""Runs the siblings of one task under a group id; every trajectory is in the ledger when it returns."""


@dataclass(slots=True)
class ProducerCounts:
    """Counts of what happened to rollouts since the run started."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    drops: Counter[str] = field(default_factory=Counter[str])
    last_error: str = ""


class Producer:
    """Groups on their way from the task stream to a batch."""

    def __init__(
        self,
        *,
        run_group: RunGroup,
        draws: Draws,
        ledger: Ledger,
        admission: Admission,
        group_size: int,
        straggler: str,
        straggler_wait_s: float,
        max_concurrent: int,
        max_failed_groups: int,
        rule: LossRule | None = None,
        dynamic_sampling: DynamicSampling | None = None,
    ) -> None:
        self.admission = admission
        self.ready: list[ReadyGroup] = []  # oldest first
        self.running: dict[str, int] = {}  # by group id: the version at which it started
        self.counts = ProducerCounts()
        self._run_group = run_group
        self.draws = draws
        self._ledger = ledger
        self._group_size = group_size
        self._straggler = straggler
        self._straggler_wait_s = straggler_wait_s
        self._max_concurrent = max_concurrent
        self._max_failed_groups = max_failed_groups
        self._rule = rule or LossRule()
        self._dynamic_sampling = dynamic_sampling
        self._failed_in_a_row = 0
        self._is_draining = False
        self._changed = asyncio.Event()

    async def restore(self, waiting: Iterable[Trajectory]) -> int:
        """Restore the groups that an earlier process of this run finished but did not train. Return their number."""
        groups = _by_group(waiting)
        cut_off = {group_id for group_id, siblings in groups.items() if _is_cut_off(siblings)}
        await self._drop({one.session_id: Drop.ORPHAN for group_id in cut_off for one in groups[group_id]})
        for group_id, siblings in groups.items():
            if group_id not in cut_off:
                group = TrajectoryGroup(group_id=group_id, task_id=siblings[0].task_id, trajectories=tuple(siblings))
                self.admission.start(self._group_size)
                await self._finish(group)
        return len(groups) - len(cut_off)

    async def admit_forever(self) -> None:
        """Run the admit loop. Raises RolloutsFailing when group after group fails as a whole."""
        async with asyncio.TaskGroup() as groups:
            while True:
                await self._until(self._may_start)
                draw = self.draws.draw()
                self.admission.start(self._group_size)
                self.running[draw.group_id] = self.admission.step
                groups.create_task(self._produce(draw), name=draw.group_id).add_done_callback(self._give_up)

    @asynccontextmanager
    async def drained(self) -> AsyncGenerator[None]:
        """Wait on entering for the groups under way to end; inside, none starts."""
        self._is_draining = True
        try:
            await self._until(lambda: self.admission.running == 0)
            yield
        finally:
            self._is_draining = False
            self._changed.set()

    def publish(self, step: int) -> None:
        """Move the staleness bound: a new weight version serves."""
        self.admission.step = step
        self._changed.set()

    async def take(self, step: int, num_groups: int) -> RolloutBatch:
        """Return the batch for train step `step`, leased: whole groups, oldest first, within the staleness bound."""
        deadline: float | None = None
        while True:
            await self._drop_stale_groups(step)
            if len(self.ready) >= num_groups:
                stragglers = self._stragglers(step) if self._straggler == "wait" else ()
                if not stragglers:
                    break
                deadline = deadline or time.monotonic() + self._straggler_wait_s
                if time.monotonic() >= deadline:
                    logger.warning("going on without the stragglers %s", stragglers)
                    break
            await self._change(deadline)
        taken, self.ready = self.ready[:num_groups], self.ready[num_groups:]
        for _ in taken:
            self.admission.consume(self._group_size)
        self._changed.set()
        return await self._lease(step, taken)

    async def roll_out(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        """Run exactly these tasks now, outside the bound and the stream, and lease what can be trained of them."""
        draws = [self.draws.give(task) for task in tasks]
        async with asyncio.TaskGroup() as running:
            groups = [running.create_task(self._run_group(draw.group_id, draw.task)) for draw in draws]
        self.admission.consumed += len(tasks) * self._group_size
        ready = [await self._finished(group.result()) for group in groups]
        return await self._lease(step, [one for one in ready if one is not None])

    async def settle(self, *, is_completed: bool) -> None:
        """Drop what was cut off, at the end of a run; with `is_completed` also what finished and nobody will train."""
        drops = {
            one.session_id: Drop.ORPHAN if _is_cut_off(siblings) else FATE_OF_STATUS.get(one.status, Drop.ORPHAN)
            for siblings in _by_group(await self._ledger.ask(questions.waiting)).values()
            for one in siblings
            if is_completed or one.status is not Status.COMPLETED
        }
        await self._drop(drops)

    async def _lease(self, step: int, taken: Sequence[ReadyGroup]) -> RolloutBatch:
        """Turn taken groups into records. Trajectories without a token to train are dropped here."""
        for ready in taken:
            self._learn(ready)
        records: list[TokenRecord] = []
        leases: list[Lease] = []
        drops: dict[str, Drop] = {}
        for trajectory in (one for ready in taken for one in ready.trainable):
            has_stale = self._is_stale(oldest_step(trajectory), step)
            if self._straggler != "mask" and has_stale:
                drops[trajectory.session_id] = Drop.STALE
                continue
            records_of = token_records(trajectory, self._rule)
            own = self._without_stale_tokens(records_of, step)
            num_tokens = sum(int(record.loss_mask.sum()) for record in own)
            if num_tokens == 0:
                drops[trajectory.session_id] = Drop.STALE if has_stale else self._rule.drop_of(trajectory)
                continue
            records += own
            leases.append(Lease.of(trajectory, num_tokens))
        await self._drop(drops)
        await self._ledger.lease(step, leases)
        return RolloutBatch(step=step, groups=tuple(ready.group for ready in taken), records=tuple(records))

    async def _finished(self, group: TrajectoryGroup) -> ReadyGroup | None:
        """Give every trajectory that cannot be trained its fate; return None when nothing of the group is left."""
        drops: dict[str, Drop] = {}
        for trajectory in group.trajectories:
            if trajectory.status is not Status.COMPLETED and trajectory.fate is None:  # an orphan has its fate already
                drops[trajectory.session_id] = FATE_OF_STATUS[trajectory.status]
            if not trajectory.role:  # rollouts are counted, not their roles
                self.counts.statuses[trajectory.status] += 1
                if trajectory.status is not Status.COMPLETED:
                    self.counts.last_error = f"{trajectory.status}: {trajectory.error}"
        await self._drop(drops)
        trainable = tuple(one for one in group.trajectories if one.status is Status.COMPLETED and one.fate is None)
        return ReadyGroup(group=group, trainable=trainable) if trainable else None

    async def _produce(self, draw: Draw) -> None:
        has_completed = await self._finish(await self._run_group(draw.group_id, draw.task))
        self._failed_in_a_row = 0 if has_completed else self._failed_in_a_row + 1
        if self._failed_in_a_row >= self._max_failed_groups:
            raise RolloutsFailing(
                f"{self._failed_in_a_row} groups in a row failed as a whole; the last failure was: "
                f"{self.counts.last_error}"
            )
        if self._dynamic_sampling is not None and self._dynamic_sampling.is_exhausted:
            raise RolloutsFailing(self._dynamic_sampling.describe())

    def _give_up(self, task: asyncio.Task[None]) -> None:
        """Give the capacity of a group back that was cut off, even before it began, so that nobody waits for it."""
        if self.running.pop(task.get_name(), None) is not None:
            self.admission.give_back_running(self._group_size)
            self._changed.set()

    async def _finish(self, group: TrajectoryGroup) -> bool:
        """Put an ended group into the buffer, or give its capacity back. Return whether any rollout completed."""
        ready = await self._finished(group)
        is_kept = ready is not None and not await self._is_replaced(ready)
        self.running.pop(group.group_id, None)
        if ready is not None and is_kept:
            self.admission.finish(self._group_size)
            self.ready.append(ready)
            self.ready.sort(key=lambda one: (one.oldest, one.group.group_id))
        else:
            self.admission.give_back_running(self._group_size)
        self._changed.set()
        return ready is not None

    async def _is_replaced(self, ready: ReadyGroup) -> bool:
        """Drop a group without spread, with dynamic sampling, and return whether that happened."""
        if self._dynamic_sampling is None or not self._dynamic_sampling.replaces(ready.trainable):
            return False
        self._learn(ready)
        await self._drop({one.session_id: self._rule.drop_of(one) for one in ready.trainable})
        return True

    def _learn(self, ready: ReadyGroup) -> None:
        if rewards := [one.rewards.total for one in ready.trainable if not one.role]:
            self.draws.learn(ready.group.task_id, rewards)

    def _may_start(self) -> bool:
        running = self.admission.running
        if self._is_draining:
            return False
        has_slots = running == 0 or running + self._group_size <= self._max_concurrent
        return has_slots and self.admission.may_admit(self._group_size)

    def _stragglers(self, step: int) -> tuple[str, ...]:
        """Return the running groups that would be too stale after train step `step`, the last one that may use them."""
        bound = self.admission.max_staleness
        return tuple(group_id for group_id, start in self.running.items() if step - start > bound)

    def _is_stale(self, oldest: int, step: int) -> bool:
        """Return whether a token of version `oldest` is beyond the bound in train step `step`."""
        return is_stale(oldest, step, self.admission.max_staleness)

    async def _drop_stale_groups(self, step: int) -> None:
        """Drop the groups of which every trajectory is beyond the bound for train step `step`."""
        if self._straggler == "mask":
            return
        stale = [one for one in self.ready if self._is_stale(one.least_stale, step)]
        self.ready = [one for one in self.ready if not self._is_stale(one.least_stale, step)]
        for ready in stale:
            self.admission.give_back_finished(self._group_size)
            self._changed.set()
            await self._drop({one.session_id: Drop.STALE for one in ready.trainable})

    def _without_stale_tokens(self, records: Sequence[TokenRecord], step: int) -> Sequence[TokenRecord]:
        """Take tokens beyond the bound out of the loss, with `straggler: mask`."""
        if self._straggler != "mask":
            return records
        return [without_stale_tokens(record, step, self.admission.max_staleness) for record in records]

    async def _drop(self, drops: Mapping[str, Drop]) -> None:
        if drops:
            self.counts.drops.update(drop.value for drop in drops.values())
            await self._ledger.drop(drops)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change(None)

    async def _change(self, deadline: float | None) -> None:
        """Wait for the next change, at most until `deadline` (monotonic). The caller checks again what changed."""
        self._changed.clear()
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            pass


def _by_group(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        groups.setdefault(one.group_id.removesuffix(f"/{one.role}"), []).append(one)
    return groups


def _is_cut_off(siblings: Iterable[Trajectory]) -> bool:
    """Return whether their group never ended: one that failed as a whole has its fates already."""
    return not any(one.status is Status.COMPLETED for one in siblings)
