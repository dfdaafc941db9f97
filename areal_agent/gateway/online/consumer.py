"""What a trainer does with the rollouts of a stand-alone gateway: publish, lease, acknowledge, return, drop.

::

    sessions ─▶ Groups ─▶ lease ─▶ (trainer) ─▶ acknowledge: trained
                  ▲                    └─▶ return: it resumed from an earlier checkpoint
                  └────────────────────────────┘

A `Consumer` is the gateway's journal, so it sees every session's end. What must outlive the process (leases, fates,
rewards, the trainer's progress) is in the ledger, from which the groups are rebuilt at the start. It runs no tasks of
its own: a waiting lease looks again after each change. `Choice` picks the groups of a batch.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

import orjson
from aiohttp import web
from pydantic import TypeAdapter

from areal_agent.errors import LedgerError, RequestError
from areal_agent.gateway.metrics import GatewayStats
from areal_agent.gateway.online.groups import (
    Bound,
    Group,
    Groups,
    Labels,
    Progress,
    Waiting,
    as_waiting,
    in_groups,
    leases_of,
    why_untrainable,
)
from areal_agent.gateway.online.wire import (
    AcknowledgeRequest,
    DropRequest,
    GatewayStatus,
    LeaseReply,
    LeaseRequest,
    PublishRequest,
    ReturnReply,
    ReturnRequest,
    State,
    StateReply,
    StatusRequest,
    TrainerRequest,
    encode_lease,
)
from areal_agent.gateway.server import json_reply
from areal_agent.gateway.session import RewardRequest, with_reward
from areal_agent.ledger import questions
from areal_agent.ledger.ledger import Ledger
from areal_agent.observe.clock import BusyClock
from areal_agent.process import uninterrupted
from areal_agent.types import Drop, JsonObject, SessionRecord, Trajectory, TrajectoryGroup, Turn

R = TypeVar("R", bound=TrainerRequest)
T = TypeVar("T")
P = ParamSpec("P")

DEFAULT_GROUP_WAIT_S = 60.0
"""Seconds that a group waits for siblings that have not started and for rewards that have not come."""

TRAINER_NOTE = "online"

GROUP_NOTE = "online/group/"
"""With a group's id: its size. A session does not name its siblings, so it is noted before the first one starts."""


def _to_its_end(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Complete a call that reads and then writes even if its caller hangs up."""

    @wraps(call)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await uninterrupted(call(*args, **kwargs))

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """The steps of one trainer, in the ledger's numbers, and its incarnations: tokens of any other are another's.

    The ledger numbers train steps once for all trainers, always upwards. Each trainer counts from its own checkpoint;
    its step s is the ledger's step `offset + s`. So a trainer that takes a gateway over begins after everything that
    was trained before and undoes none of it.
    """

    trainer: str | None = None  # None for a trainer without a name
    base: int = 0  # the ledger's last checkpoint when the trainer came: what others trained is never undone
    offset: int = 0
    labels: Labels = field(default_factory=Labels)

    def serving(self, incarnation: int | None) -> Self:
        """Return the lineage when weights of `incarnation` serve; None: the trainer does not say which."""
        return self if incarnation is None else replace(self, labels=self.labels.naming(incarnation))

    def ledger_step(self, step: int) -> int:
        return self.offset + step

    def after(self, step: int) -> Self:
        """Return the lineage when the trainer resumes from its own checkpoint of `step`."""
        return replace(self, offset=max(self.offset, self.base - step))


def lineage_for(trainer: str | None, held: Lineage | None) -> Lineage:
    """Return the lineage of a trainer's call. The first trainer gets a gateway that nobody has.

    Raises RequestError (409) when another trainer has it.
    """
    if held is None:
        return Lineage(trainer=trainer)
    if held.trainer != trainer:
        raise conflict(
            f"this gateway belongs to {_name(held.trainer)}, not to {_name(trainer)}; to take it over, call "
            '/rl/return {"trainer": ..., "after_step": ..., "adopt": true}: what was trained stays trained',
            code="other_trainer",
        )
    return held


def require_nothing_undone(after_step: int, lineage: Lineage, last_checkpoint: int) -> None:
    """Raise RequestError (409) if resuming after `after_step` would undo what a checkpoint has trained."""
    committed = last_checkpoint - lineage.offset
    if after_step < committed:
        raise conflict(
            f"after_step is {after_step}, but the checkpoint of step {committed} is acknowledged: what it trained "
            'would wait again. If that checkpoint is lost, say "adopt": true; a new run names a "trainer" of its own '
            'and says "adopt": true, which undoes nothing',
            code="would_undo",
        )


def conflict(message: str, *, code: str = "conflict") -> RequestError:
    return RequestError(message, status=409, code=code)


def _name(trainer: str | None) -> str:
    return "a nameless trainer" if trainer is None else f"trainer {trainer!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerNote:
    """The trainer's progress, bound and lineage, as the ledger notes them; None for what is not known yet."""

    progress: Progress = field(default_factory=Progress)
    bound: Bound | None = None
    lineage: Lineage | None = None


_TRAINER_NOTE = TypeAdapter(TrainerNote)


class Choice:
    """Picks the oldest ready groups for a batch. It waits for stragglers once per train step."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._stragglers_until_s: dict[int, float] = {}  # by train step

    def groups(self, request: LeaseRequest, now_s: float) -> tuple[Group, ...]:
        """Return the groups to lease now; none while there are too few or stragglers are awaited.

        Fewer groups than requested are taken when waiting could bring no more.
        """
        ready = self._groups.ready(now_s)
        taken = ready if self._groups.is_stuck(now_s) else _enough(ready, request)
        return () if taken and self._must_wait(request, now_s) else taken

    def next_look_s(self, step: int, now_s: float, deadline_s: float) -> float:
        """Return the earliest time at which the choice may change without an event."""
        times = (self._groups.next_expiry_s(now_s), self._stragglers_until_s.get(step), deadline_s)
        return min((time_s for time_s in times if time_s is not None and time_s > now_s), default=deadline_s)

    def done(self) -> None:
        """Note that the batch is leased."""
        self._stragglers_until_s.clear()

    def _must_wait(self, request: LeaseRequest, now_s: float) -> bool:
        """Return whether stragglers may still end before the batch must go without them."""
        if not self._groups.stragglers(request.step):
            return False
        return now_s < self._stragglers_until_s.setdefault(request.step, now_s + request.straggler_wait_s)


def _enough(ready: tuple[Group, ...], request: LeaseRequest) -> tuple[Group, ...]:
    """Return the first groups, as many as requested; none when there are fewer."""
    if request.num_groups is not None:
        return ready[: request.num_groups] if len(ready) >= request.num_groups else ()
    missing = request.num_trajectories or 0
    for number, group in enumerate(ready, start=1):
        missing -= len(group.waiting)
        if missing <= 0:
            return ready[:number]
    return ()


class Consumer:
    """The gateway's `protocols.Journal` and the trainer's calls. Make it with `open`; use it from one event loop."""

    def __init__(self, ledger: Ledger, groups: Groups, lineage: Lineage | None, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._groups = groups
        self._choice = Choice(groups)
        self._lineage = lineage  # None until a trainer calls
        self._clock = clock
        self._writing = asyncio.Lock()  # held by lease, drop and late reward, which read and then write
        self._changed = asyncio.Event()  # set and replaced at every change
        self._rolling = BusyClock()
        self._statuses: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()

    @classmethod
    async def open(
        cls,
        ledger: Ledger,
        *,
        bound: Bound | None = None,
        group_wait_s: float = DEFAULT_GROUP_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Restore the ledger's waiting sessions. `bound` replaces the one that a trainer named before, if any."""
        noted: JsonObject | None = await ledger.ask(questions.note, TRAINER_NOTE)
        note = TrainerNote() if noted is None else _TRAINER_NOTE.validate_python({"lineage": {}, **noted})
        groups = Groups(wait_s=group_wait_s, bound=bound or note.bound, progress=note.progress)
        if note.lineage is not None:
            groups.labels = note.lineage.labels
        consumer = cls(ledger, groups, note.lineage, clock)
        await consumer._restore()
        return consumer

    # -------------------------------------------------------------------------------- the gateway's side

    def admit(self, session_id: str, group_id: str, group_size: int | None) -> None:
        """Admit a session for training, or raise RequestError: 429 at the staleness bound."""
        now_s = self._clock()
        try:
            self._groups.start(session_id, group_id, group_size, now_s)
        except RequestError:
            if self._groups.is_stuck(now_s):  # leasing what there is would make room
                self._notify()
            raise
        self._rolling.begin()

    def withdraw(self, session_id: str) -> None:
        """Undo `admit` for a session that could not be opened."""
        self._groups.withdraw(session_id)
        self._rolling.end()
        self._notify()

    async def open_session(self, session: SessionRecord) -> None:
        group_size = self._groups.size_of_first(session.id)
        if group_size is not None and group_size > 1:
            await self._ledger.set_note(GROUP_NOTE + session.group_id, group_size)
        await self._ledger.own.open_session(session)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self._ledger.own.append_turn(session_id, turn)

    async def close_session(self, trajectory: Trajectory) -> None:
        """Journal the end. When this returns, a trajectory that can never be trained has been dropped."""
        await self._ledger.own.close_session(trajectory)
        session_id = trajectory.session_id
        if not self._groups.is_running(session_id):  # an evaluation, which no trainer sees
            return
        self._rolling.end()
        self._statuses[trajectory.status.value] += 1
        drop = why_untrainable(trajectory)
        self._groups.end(session_id, None if drop else as_waiting(trajectory), self._clock())
        if drop:
            await self._drop({session_id: drop})
        self._notify()

    @_to_its_end
    async def reward_late(self, session_id: str, request: RewardRequest) -> None:
        """Set a reward of an ended session; it is durable when this returns.

        Raises RequestError (409) once the trajectory is leased, trained or dropped.
        """
        async with self._writing:
            trajectory = await self._ledger.trajectory(session_id)
            if not self._groups.is_waiting(session_id):
                standing = trajectory.fate or "leased for a train step"
                raise conflict(
                    f"session {session_id!r} is {standing} already, so it accepts no more rewards; set the reward "
                    "before /rl/end_session, or soon after it",
                    code="reward_too_late",
                )
            ids = {one.id for turn in trajectory.turns for one in turn.completions}
            rewards = with_reward(trajectory.rewards, request, ids)
            with _refusals():
                await self._ledger.set_rewards(session_id, rewards)
            if not rewards.is_missing:
                self._groups.reward(session_id, self._clock())
        self._notify()

    # -------------------------------------------------------------------------------- the trainer's side

    async def publish(self, request: PublishRequest) -> None:
        """Note that version `step` serves; this moves the staleness bound."""
        lineage = lineage_for(request.trainer, self._lineage)
        progress = self._groups.progress
        if request.step < progress.published:
            raise conflict(
                f"version {progress.published} is published already and {request.step} is older; a trainer that "
                "resumed from a checkpoint calls /rl/return first"
            )
        if request.batch_answers is not None and request.max_staleness is not None:
            self._groups.bound = Bound(batch_answers=request.batch_answers, max_staleness=request.max_staleness)
        await self._advance(progress.to_version(request.step), lineage.serving(request.incarnation))

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Lease whole groups for a train step, the oldest first; none when there are not enough in time.

        Repeating the call (after a lost answer or a crash of either side) returns the same groups.
        """
        deadline_s = self._clock() + request.wait_s
        while True:
            changed = self._changed
            groups = await self._try_lease(request)
            now_s = self._clock()
            if groups or now_s >= deadline_s:
                return LeaseReply(step=request.step, groups=groups, state=self.state())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._choice.next_look_s(request.step, now_s, deadline_s) - now_s):
                    await changed.wait()

    @_to_its_end
    async def acknowledge(self, request: AcknowledgeRequest) -> None:
        """Note a published checkpoint: what was leased up to its step is trained."""
        async with self._writing:
            lineage = lineage_for(request.trainer, self._lineage)
            leased = self._groups.progress.leased
            if request.step > leased:
                raise conflict(f"no batch was ever leased for step {request.step}; the last was for step {leased}")
            with _refusals():
                await self._ledger.commit_checkpoint(lineage.ledger_step(request.step), request.checkpoint)

    @_to_its_end
    async def give_back(self, request: ReturnRequest) -> int:
        """Resume from the checkpoint of `after_step`: later leases wait again. Returns the number of trajectories."""
        async with self._writing:
            last_checkpoint = await self._ledger.ask(questions.last_checkpoint)
            if request.adopts and self._lineage is not None and self._lineage.trainer != request.trainer:
                lineage = Lineage(trainer=request.trainer, base=last_checkpoint).after(request.after_step)
                kept_step = last_checkpoint  # what the other one leased since has no checkpoint
            else:
                lineage = lineage_for(request.trainer, self._lineage)
                if not request.adopts:
                    require_nothing_undone(request.after_step, lineage, last_checkpoint)
                lineage = lineage.after(request.after_step)
                kept_step = lineage.ledger_step(request.after_step)
            with _refusals():
                num_returned = await self._ledger.return_leases(kept_step)
            await self._advance(Progress(published=request.after_step, leased=request.after_step), lineage)
            await self._restore()
        return num_returned

    @_to_its_end
    async def drop(self, request: DropRequest) -> None:
        """Drop waiting sessions, all or none. Sessions already dropped for the same reason are no error."""
        async with self._writing:
            lineage_for(request.trainer, self._lineage)  # refuses a trainer that another one has displaced
            with _refusals():
                await self._drop(dict.fromkeys(request.session_ids, request.reason))
        self._notify()

    @property
    def ledger_path(self) -> str:
        """The ledger's path on this machine, which needs no working directory."""
        return str(self._ledger.path.resolve())

    def state(self) -> State:
        groups = self._groups
        groups.give_up_unstarted(self._clock())
        return State(
            trainer=self._lineage.trainer if self._lineage else None,
            published=groups.progress.published,
            leased=groups.progress.leased,
            num_running=groups.num_running,
            num_finished=groups.num_finished,
            rolling_s=self._rolling.busy_s,
            capacity=None if groups.capacity is None else max(0, groups.capacity),
            statuses=dict(self._statuses),
            drops=dict(self._drops),
        )

    # ------------------------------------------------------------------------------------------ the lease

    @_to_its_end
    async def _try_lease(self, request: LeaseRequest) -> tuple[TrajectoryGroup, ...]:
        async with self._writing:
            lineage = lineage_for(request.trainer, self._lineage)
            again = await self._leased_before(request.step, lineage)
            if again:
                return again
            await self._drop_hopeless(request.step)
            while taken := self._choice.groups(request, self._clock()):
                groups = await self._lease(request, taken, lineage)
                if groups:
                    return groups
            return ()

    async def _leased_before(self, step: int, lineage: Lineage) -> tuple[TrajectoryGroup, ...]:
        """Return this step's batch if it was leased before. Raises RequestError for a step that cannot be next."""
        leased = self._groups.progress.leased
        again = in_groups(await self._ledger.ask(questions.leased, lineage.ledger_step(step))) if step <= leased else ()
        if not again and step not in (leased, leased + 1):
            raise conflict(
                f"step {step} cannot be leased for; the next is {leased + 1}. A trainer that resumes from a checkpoint "
                "calls /rl/return first"
            )
        return again

    async def _lease(
        self, request: LeaseRequest, taken: Sequence[Group], lineage: Lineage
    ) -> tuple[TrajectoryGroup, ...]:
        """Lease these groups; none if a trajectory without a trainable token had to be dropped first."""
        trajectories = [await self._ledger.trajectory(session_id) for group in taken for session_id in group.waiting]
        rule, step = request.loss_rule, request.step
        leases = await asyncio.to_thread(leases_of, trajectories, rule)
        useless = {
            one.session_id: rule.drop_of(one)
            for one, lease in zip(trajectories, leases, strict=True)
            if lease.num_loss_tokens == 0
        }
        if useless:
            await self._drop(useless)
            return ()
        num_answers = sum(group.size for group in taken)
        progress = self._groups.progress.to_batch(step, num_answers, self._groups.bound)
        await self._advance(progress, lineage)  # before the lease, so that a crash in between makes no second batch
        with _refusals():
            await self._ledger.lease(lineage.ledger_step(step), leases)
        self._groups.lease([one.session_id for one in leases])
        self._choice.done()
        return in_groups(trajectories)

    async def _drop_hopeless(self, step: int) -> None:
        """Drop what is beyond the staleness bound and what was not rewarded in time."""
        now_s = self._clock()
        self._groups.give_up_unstarted(now_s)
        drops = dict.fromkeys(self._groups.unrewarded(now_s), Drop.MISSING_REWARD)
        await self._drop(drops | dict.fromkeys(self._groups.stale(step), Drop.STALE))

    # ------------------------------------------------------------------------------------------ internals

    async def _restore(self) -> None:
        """Restore the ledger's waiting sessions that the groups lack."""
        drops: dict[str, Drop] = {}
        waiting: dict[str, list[Waiting]] = {}
        for trajectory in await self._ledger.ask(questions.waiting):
            drop = why_untrainable(trajectory)
            if drop:
                drops[trajectory.session_id] = drop
            else:
                waiting.setdefault(trajectory.group_id, []).append(as_waiting(trajectory))
        sizes: list[int | None] = await asyncio.gather(
            *(self._ledger.ask(questions.note, GROUP_NOTE + group_id) for group_id in waiting)
        )
        ended = await self._ledger.ask(questions.siblings, waiting)
        now_s = self._clock()
        for (group_id, members), size in zip(waiting.items(), sizes, strict=True):
            self._groups.restore(group_id, size=size or 1, ended=ended[group_id], waiting=members, now_s=now_s)
        self._groups.leased = set(await self._ledger.ask(questions.leased_groups))
        await self._drop(drops)
        self._notify()

    async def _drop(self, drops: Mapping[str, Drop]) -> None:
        if drops:
            await self._ledger.drop(drops)
            self._drops.update(reason.value for reason in drops.values())
            self._groups.give_up(drops, self._clock())

    async def _advance(self, progress: Progress, lineage: Lineage) -> None:
        self._groups.progress = progress
        self._groups.labels = lineage.labels
        self._lineage = lineage
        note = TrainerNote(progress=progress, bound=self._groups.bound, lineage=lineage)
        await self._ledger.set_note(TRAINER_NOTE, asdict(note))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """Turn a LedgerError into a 409: the request conflicts with the ledger."""
    try:
        yield
    except LedgerError as error:
        raise conflict(str(error)) from error


TrainerHandler = Callable[[JsonObject], Awaitable[web.Response]]


def trainer_handlers(consumer: Consumer, stats: Callable[[], GatewayStats]) -> Mapping[str, TrainerHandler]:
    """The handlers of a trainer's calls by path; each gets the body of a request that came with the admin key."""

    def then_state(kind: type[R], act: Callable[[R], Awaitable[None]]) -> TrainerHandler:
        async def handler(body: JsonObject) -> web.Response:
            await act(kind.read(body))
            return json_reply(StateReply(state=consumer.state()))

        return handler

    async def lease(body: JsonObject) -> web.Response:
        request = LeaseRequest.read(body)
        reply = await consumer.lease(request)
        payload = await asyncio.to_thread(encode_lease, reply, request)
        return web.Response(body=payload, content_type="application/json")

    async def give_back(body: JsonObject) -> web.Response:
        num_returned = await consumer.give_back(ReturnRequest.read(body))
        return json_reply(ReturnReply(num_returned=num_returned, state=consumer.state()))

    async def status(body: JsonObject) -> web.Response:
        StatusRequest.read(body)
        reply = GatewayStatus(state=consumer.state(), stats=stats(), ledger=consumer.ledger_path)
        payload = orjson.dumps(reply, option=orjson.OPT_NON_STR_KEYS)
        return web.Response(body=payload, content_type="application/json")

    return {
        "/rl/publish": then_state(PublishRequest, consumer.publish),
        "/rl/lease": lease,
        "/rl/acknowledge": then_state(AcknowledgeRequest, consumer.acknowledge),
        "/rl/return": give_back,
        "/rl/drop": then_state(DropRequest, consumer.drop),
        "/rl/status": status,
    }
