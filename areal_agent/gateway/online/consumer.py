"""What a trainer does with the rollouts of a gateway that stands alone: publish, lease, acknowledge, return, drop.

::

    sessions ─▶ Groups ─▶ lease ─▶ (trainer) ─▶ acknowledge: trained
                  ▲                    └─▶ return: it resumed from an earlier checkpoint
                  └────────────────────────────┘

It stands between gateway and ledger: it is the gateway's journal, so that no end of a session escapes it. What must
outlive the process (leases, fates, rewards, how far the trainer is) is in the ledger; the groups are read from there
at the start. It owns no task: whoever waits for a lease looks again after each change.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Self

from areal_agent.cancellation import uninterrupted
from areal_agent.errors import LedgerError, RequestError
from areal_agent.gateway.control import RewardRequest
from areal_agent.gateway.online.bodies import AcknowledgeRequest, DropRequest, LeaseRequest, PublishRequest
from areal_agent.gateway.online.bound import Bound, Progress
from areal_agent.gateway.online.group import Group
from areal_agent.gateway.online.groups import Groups
from areal_agent.gateway.online.trainable import as_waiting, in_groups, lease_terms, why_untrainable, with_reward
from areal_agent.gateway.online.wire import LeaseReply, State
from areal_agent.ledger.ledger import Ledger
from areal_agent.observe.busy import BusyClock
from areal_agent.types import Drop, SessionRecord, Trajectory, TrajectoryGroup, Turn

DEFAULT_GROUP_WAIT_S = 60.0
"""How long a group waits for siblings that do not start and for rewards that do not come."""

NOTE = "online"
"""The ledger's note on how far the trainer is, and what bound it named."""


class Consumer:
    """`protocols.Journal` for the gateway, and the trainer's calls. Make it with `open`; use it from one event loop."""

    def __init__(self, ledger: Ledger, groups: Groups, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._groups = groups
        self._clock = clock
        self._writing = asyncio.Lock()  # a lease, a drop, a late reward: each reads, then writes
        self._changed = asyncio.Event()  # set and replaced at every change
        self._stragglers_until: dict[int, float] = {}  # by train step
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
        """Take up what the ledger has waiting. `bound` replaces the one that a trainer named before, if any."""
        note = await ledger.get_note(NOTE) or {}
        named = note.get("bound")
        groups = Groups(
            wait_s=group_wait_s,
            bound=bound or (Bound(**named) if named else None),
            progress=Progress(**note.get("progress", {})),
        )
        consumer = cls(ledger, groups, clock)
        await consumer._restore()
        return consumer

    # -------------------------------------------------------------------------------- the gateway's side

    def admit(self, session_id: str, group_id: str, group_size: int | None) -> None:
        """Let a session for training in, or raise RequestError: 429 at the staleness bound."""
        now_s = self._clock()
        self._groups.give_up_unstarted(now_s)
        self._groups.start(session_id, group_id, group_size, now_s)
        self._rolling.begin()

    def withdraw(self, session_id: str) -> None:
        """Undo `admit`: the session could not be opened."""
        self._groups.withdraw(session_id)
        self._rolling.end()
        self._notify()

    async def open_session(self, session: SessionRecord) -> None:
        await self._ledger.open_session(session)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        await self._ledger.append_turn(session_id, turn)

    async def close_session(self, trajectory: Trajectory) -> None:
        """Journal the end; what can never be trained has its fate when this returns."""
        await self._ledger.close_session(trajectory)
        session_id = trajectory.session_id
        if not self._groups.is_running(session_id):  # an evaluation: no trainer ever sees it
            return
        self._rolling.end()
        self._statuses[trajectory.status.value] += 1
        drop = why_untrainable(trajectory)
        self._groups.end(session_id, None if drop else as_waiting(trajectory), self._clock())
        if drop:
            await self._drop({session_id: drop})
        self._notify()

    async def reward_late(self, session_id: str, request: RewardRequest) -> None:
        """A reward for a session that has ended; it is durable when this returns.

        Raises RequestError (409) once the trajectory is leased or has its fate.
        """
        await uninterrupted(self._reward_late(session_id, request))

    # -------------------------------------------------------------------------------- the trainer's side

    async def publish(self, request: PublishRequest) -> None:
        """Version `step` serves: the bound moves."""
        progress = self._groups.progress
        if request.step < progress.published:
            raise _conflict(
                f"version {progress.published} is published already, {request.step} is older; a trainer that resumed "
                "from a checkpoint says so by /rl/return"
            )
        if request.batch_answers is not None and request.max_staleness is not None:
            self._groups.bound = Bound(batch_answers=request.batch_answers, max_staleness=request.max_staleness)
        await self._advance(Progress(published=request.step, leased=max(request.step, progress.leased)))

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Whole groups for a train step, the oldest first, leased; none when there are not enough in time.

        Asked for again (an answer was lost, or either side died), it is the same groups.
        """
        deadline_s = self._clock() + request.wait_s
        while True:
            changed = self._changed
            groups = await uninterrupted(self._try_lease(request))
            now_s = self._clock()
            if groups or now_s >= deadline_s:
                return LeaseReply(step=request.step, groups=groups, state=self.state())
            await self._wait(changed, min(deadline_s, self._next_look_s(request.step, now_s, deadline_s)) - now_s)

    async def acknowledge(self, request: AcknowledgeRequest) -> None:
        """A checkpoint is safe: what was leased up to its step is trained."""
        if request.step > self._groups.progress.leased:
            raise _conflict(f"step {request.step} was never leased for; the last was {self._groups.progress.leased}")
        with _refusals():
            await self._ledger.commit_checkpoint(request.step, request.checkpoint)

    async def give_back(self, after_step: int) -> int:
        """The trainer goes on from the checkpoint of `after_step`: later leases wait again; how many trajectories."""
        return await uninterrupted(self._give_back(after_step))

    async def drop(self, request: DropRequest) -> None:
        """Give waiting sessions their fate, all or none. Those that have this very fate already are no error."""
        await uninterrupted(self._drop_asked(request))

    def state(self) -> State:
        groups = self._groups
        return State(
            published=groups.progress.published,
            leased=groups.progress.leased,
            num_running=groups.num_running,
            num_finished=groups.num_finished,
            rolling_s=self._rolling.busy_s,
            capacity=groups.capacity,
            statuses=dict(self._statuses),
            drops=dict(self._drops),
        )

    # ------------------------------------------------------------------------------------------ the lease

    async def _try_lease(self, request: LeaseRequest) -> tuple[TrajectoryGroup, ...]:
        async with self._writing:
            again = await self._leased_before(request.step)
            if again:
                return again
            await self._drop_hopeless(request.step)
            while (taken := self._enough(request)) and not self._must_wait(request):
                groups = await self._lease(request.step, taken)
                if groups:
                    return groups
            return ()

    async def _leased_before(self, step: int) -> tuple[TrajectoryGroup, ...]:
        """The batch of this step when it was handed out before. Raises RequestError for a step that cannot be next."""
        leased = self._groups.progress.leased
        again = in_groups(await self._ledger.leased(step)) if step <= leased else ()
        if not again and step not in (leased, leased + 1):
            raise _conflict(
                f"step {step} cannot be leased for; the next is {leased + 1}. A trainer that starts from a checkpoint "
                "says so by /rl/return"
            )
        return again

    async def _lease(self, step: int, taken: Sequence[Group]) -> tuple[TrajectoryGroup, ...]:
        """Lease these groups; none when a trajectory without a trained token had to be dropped first."""
        trajectories = [await self._ledger.trajectory(session_id) for group in taken for session_id in group.waiting]
        terms = await asyncio.to_thread(lease_terms, trajectories)
        useless = {session_id: Drop.FILTERED for session_id, one in terms.items() if one.num_loss_tokens == 0}
        if useless:
            await self._drop(useless)
            return ()
        await self._advance(replace(self._groups.progress, leased=step))  # first: a crash between is no second batch
        with _refusals():
            await self._ledger.lease(
                step,
                {session_id: one.digest for session_id, one in terms.items()},
                {session_id: one.num_loss_tokens for session_id, one in terms.items()},
            )
        self._groups.lease(terms)
        self._stragglers_until.clear()
        return in_groups(trajectories)

    def _enough(self, request: LeaseRequest) -> tuple[Group, ...]:
        """The oldest ready groups, as many as were asked for; none when there are fewer."""
        ready = self._groups.ready(self._clock())
        if request.num_groups is not None:
            return ready[: request.num_groups] if len(ready) >= request.num_groups else ()
        missing = request.num_trajectories or 0
        for number, group in enumerate(ready, start=1):
            missing -= len(group.waiting)
            if missing <= 0:
                return ready[:number]
        return ()

    async def _drop_hopeless(self, step: int) -> None:
        """Drop what is beyond the bound, and what was not rewarded in time."""
        now_s = self._clock()
        self._groups.give_up_unstarted(now_s)
        drops = dict.fromkeys(self._groups.unrewarded(now_s), Drop.MISSING_REWARD)
        await self._drop(drops | dict.fromkeys(self._groups.stale(step), Drop.STALE))

    def _must_wait(self, request: LeaseRequest) -> bool:
        """Whether there are stragglers that may yet end before the batch has to go without them."""
        if not self._groups.stragglers(request.step):
            return False
        now_s = self._clock()
        return now_s < self._stragglers_until.setdefault(request.step, now_s + request.straggler_wait_s)

    def _next_look_s(self, step: int, now_s: float, deadline_s: float) -> float:
        """When time alone may have changed what can be leased."""
        times = (self._groups.next_expiry_s(now_s), self._stragglers_until.get(step))
        return min((time_s for time_s in times if time_s is not None and time_s > now_s), default=deadline_s)

    async def _wait(self, changed: asyncio.Event, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await changed.wait()

    # ------------------------------------------------------------------------------------------ internals

    async def _restore(self) -> None:
        """Take up what the ledger has waiting and the groups have not."""
        now_s = self._clock()
        drops: dict[str, Drop] = {}
        for trajectory in await self._ledger.waiting():
            drop = why_untrainable(trajectory)
            if drop:
                drops[trajectory.session_id] = drop
            else:
                self._groups.restore(trajectory.group_id, as_waiting(trajectory), now_s)
        await self._drop(drops)
        self._notify()

    async def _reward_late(self, session_id: str, request: RewardRequest) -> None:
        async with self._writing:
            trajectory = await self._ledger.trajectory(session_id)
            if not self._groups.is_waiting(session_id):
                standing = trajectory.fate or "leased for a train step"
                raise _conflict(
                    f"session {session_id!r} is {standing}: a reward can be set until then", code="reward_too_late"
                )
            rewards = with_reward(trajectory, request)
            with _refusals():
                await self._ledger.set_rewards(session_id, rewards)
            if not rewards.is_missing:
                self._groups.reward(session_id, self._clock())
        self._notify()

    async def _give_back(self, after_step: int) -> int:
        async with self._writing:
            with _refusals():
                num_returned = await self._ledger.return_leases(after_step)
            await self._advance(Progress(published=after_step, leased=after_step))
            await self._restore()
        return num_returned

    async def _drop_asked(self, request: DropRequest) -> None:
        async with self._writing:
            with _refusals():
                await self._drop(dict.fromkeys(request.session_ids, request.reason))
        self._notify()

    async def _drop(self, drops: Mapping[str, Drop]) -> None:
        if drops:
            await self._ledger.drop(drops)
            self._drops.update(reason.value for reason in drops.values())
            self._groups.give_up(drops, self._clock())

    async def _advance(self, progress: Progress) -> None:
        self._groups.progress = progress
        bound = self._groups.bound
        await self._ledger.set_note(NOTE, {"progress": asdict(progress), "bound": asdict(bound) if bound else None})
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _conflict(message: str, *, code: str = "conflict") -> RequestError:
    return RequestError(message, status=409, code=code)


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """What the ledger refuses is a conflict of the caller's with what is there."""
    try:
        yield
    except LedgerError as error:
        raise _conflict(str(error)) from error
