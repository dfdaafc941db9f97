"""What a closed trajectory is to a trainer: whether it can be trained, how old it is, what a lease says of it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from areal_agent.gateway.control import RewardRequest
from areal_agent.gateway.online.group import Waiting
from areal_agent.gateway.rewards import RewardBook
from areal_agent.ledger.digest import lease_digest
from areal_agent.ledger.fates import FATE_OF_STATUS
from areal_agent.staleness import oldest_step
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, Rewards, Status, Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTerms:
    """What the ledger keeps of a leased trajectory."""

    digest: str
    num_loss_tokens: int


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


def lease_terms(trajectories: Iterable[Trajectory]) -> dict[str, LeaseTerms]:
    """By session id. Takes milliseconds a trajectory: call it in a thread."""
    terms: dict[str, LeaseTerms] = {}
    for one in trajectories:
        num_loss_tokens = sum(int(record.loss_mask.sum()) for record in token_records(one))
        digest = lease_digest(one, num_loss_tokens)
        terms[one.session_id] = LeaseTerms(digest=digest, num_loss_tokens=num_loss_tokens)
    return terms


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
