"""A leased batch as JSON, and back: exact. The round trip keeps every token id, and every log-probability's bits.

Trajectories hold each token once, so they are what travels; `token_records` makes the same records of them on both
sides. Whoever has no `token_records` can ask for the records as well.

The bodies of `/rl/publish`, `/rl/lease`, `/rl/acknowledge`, `/rl/return` and `/rl/drop`: what a trainer asks for.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson

from areal_agent.errors import GatewayError, RequestError
from areal_agent.gateway.bodies import (
    as_bounded_number,
    as_flag,
    as_integer,
    as_list,
    as_member,
    as_name,
    as_text,
    refuse,
    refuse_unknown,
)
from areal_agent.gateway.metrics import GatewayStats
from areal_agent.tokens.records import token_records
from areal_agent.types import (
    Completion,
    Distribution,
    Drop,
    Fate,
    FinishReason,
    ForkReason,
    JsonObject,
    Rewards,
    SamplingParams,
    Status,
    Trajectory,
    TrajectoryGroup,
    Turn,
    VersionSpan,
    WeightVersion,
)

DAMAGE = (KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Where a gateway stands: whole answers, failed siblings included."""

    trainer: str | None  # who has it; None: nobody yet, or one that does not say
    published: int  # the weight version that serves, as the trainer said
    leased: int  # the last train step that a batch was handed out for
    num_running: int
    num_finished: int
    rolling_s: float  # seconds with a session for training open, since the gateway started
    capacity: int | None  # how many more may start; None: no trainer has named a bound yet
    statuses: Mapping[str, int]  # of sessions that ended since the gateway started
    drops: Mapping[str, int]  # of sessions dropped since the gateway started, by reason


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayStatus:
    """The answer of `/rl/status`: where a gateway stands with its groups, and what it has counted since it started."""

    state: State
    stats: GatewayStats


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """The answer of `/rl/lease`. No groups: there were not enough of them in time, and nothing is leased."""

    step: int
    groups: tuple[TrajectoryGroup, ...]
    state: State


async def encode_lease(reply: LeaseReply, *, with_records: bool) -> bytes:
    """In a thread: a batch may be large."""
    return await asyncio.to_thread(_encode_lease, reply, with_records)


def _encode_lease(reply: LeaseReply, with_records: bool) -> bytes:
    body: dict[str, Any] = {"step": reply.step, "groups": reply.groups, "state": reply.state}
    if with_records:
        body["records"] = [
            record for group in reply.groups for one in group.trajectories for record in token_records(one)
        ]
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_lease(body: JsonObject) -> LeaseReply:
    """Raises GatewayError for what is no answer of `/rl/lease`."""
    try:
        return LeaseReply(
            step=body["step"],
            groups=tuple(_group(group) for group in body["groups"]),
            state=decode_state(body["state"]),
        )
    except DAMAGE as error:
        raise GatewayError(f"the gateway's lease cannot be read: {error!r}; is it of the same release?") from error


def encode_status(status: GatewayStatus) -> bytes:
    return orjson.dumps(status, option=orjson.OPT_NON_STR_KEYS)


def decode_status(body: JsonObject) -> GatewayStatus:
    """Raises GatewayError for what is no answer of `/rl/status`."""
    try:
        fields = dict(body["stats"])
        fields["forks"] = {ForkReason(reason): number for reason, number in fields["forks"].items()}
        fields["errors"] = {int(status): number for status, number in fields["errors"].items()}
        return GatewayStatus(state=decode_state(body["state"]), stats=GatewayStats(**fields))
    except DAMAGE as error:
        raise GatewayError(f"the gateway's status cannot be read: {error!r}; is it of the same release?") from error


def decode_state(body: JsonObject) -> State:
    """Raises GatewayError for what is no state."""
    try:
        return State(**body)
    except DAMAGE as error:
        raise GatewayError(f"the gateway's state cannot be read: {error!r}; is it of the same release?") from error


def decode_trajectory(body: JsonObject) -> Trajectory:
    """The inverse of what orjson writes of a trajectory."""
    rewards, fate = body["rewards"], body["fate"]
    return Trajectory(
        session_id=body["session_id"],
        group_id=body["group_id"],
        task_id=body["task_id"],
        turns=tuple(_turn(turn) for turn in body["turns"]),
        rewards=Rewards(**rewards),
        status=Status(body["status"]),
        error=body["error"],
        logged=body["logged"],
        started_s=body["started_s"],
        ended_s=body["ended_s"],
        fate=None if fate is None else _fate(fate),
        undelivered=tuple(body["undelivered"]),
    )


def _group(body: JsonObject) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=body["group_id"],
        task_id=body["task_id"],
        trajectories=tuple(decode_trajectory(one) for one in body["trajectories"]),
    )


def _fate(body: JsonObject) -> Fate:
    dropped = body["dropped"]
    return Fate(trained_step=body["trained_step"], dropped=None if dropped is None else Drop(dropped))


def _turn(body: JsonObject) -> Turn:
    reason = body["fork_reason"]
    return Turn(
        id=body["id"],
        parent=body["parent"],
        fork_at=body["fork_at"],
        new_prompt_ids=tuple(body["new_prompt_ids"]),
        completions=tuple(_completion(one) for one in body["completions"]),
        request_delta=tuple(body["request_delta"]),
        sampling=_sampling(body["sampling"]),
        started_s=body["started_s"],
        ended_s=body["ended_s"],
        fork_reason=None if reason is None else ForkReason(reason),
    )


def _completion(body: JsonObject) -> Completion:
    return Completion(
        id=body["id"],
        token_ids=tuple(body["token_ids"]),
        logprobs=tuple(body["logprobs"]),
        versions=tuple(_span(one) for one in body["versions"]),
        finish_reason=FinishReason(body["finish_reason"]),
        distribution=Distribution(body["distribution"]),
    )


def _span(body: JsonObject) -> VersionSpan:
    return VersionSpan(version=WeightVersion(**body["version"]), start=body["start"], end=body["end"])


def _sampling(body: JsonObject) -> SamplingParams:
    fields: dict[str, Any] = dict(body)
    fields["stop_token_ids"] = tuple(body["stop_token_ids"])
    fields["stop"] = tuple(body["stop"])
    fields["logit_bias"] = tuple((token_id, bias) for token_id, bias in body["logit_bias"])
    return SamplingParams(**fields)


MAX_COUNT = 2**31 - 1
MAX_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishRequest:
    """Version `step` serves now. With the counts the trainer names its bound; both or neither.

    `incarnation` is the other half of the labels that the engine gives to its tokens; None: any is the trainer's.
    """

    step: int
    trainer: str | None
    incarnation: int | None
    batch_answers: int | None
    max_staleness: int | None

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(body, ("step", "trainer", "incarnation", "batch_answers", "max_staleness"))
        batch_answers = _optional_count(body, "batch_answers", low=1)
        max_staleness = _optional_count(body, "max_staleness", low=0)
        if (batch_answers is None) != (max_staleness is None):
            missing = "batch_answers" if batch_answers is None else "max_staleness"
            raise RequestError(
                f"{missing} is missing; the staleness bound needs both batch_answers and max_staleness", param=missing
            )
        return cls(
            step=_count(body, "step", low=0),
            trainer=_trainer(body),
            incarnation=_optional_count(body, "incarnation", low=0),
            batch_answers=batch_answers,
            max_staleness=max_staleness,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """Whole groups for train step `step`: so many groups, or as many as hold so many trajectories."""

    step: int
    trainer: str | None
    num_groups: int | None
    num_trajectories: int | None
    wait_s: float  # how long to wait until there are enough
    straggler_wait_s: float  # how long a batch waits for running groups that would be too stale for the next one
    wants_records: bool

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(
            body, ("step", "trainer", "num_groups", "num_trajectories", "wait_s", "straggler_wait_s", "records")
        )
        num_groups = _optional_count(body, "num_groups", low=1)
        num_trajectories = _optional_count(body, "num_trajectories", low=1)
        if (num_groups is None) == (num_trajectories is None):
            raise RequestError("give num_groups or num_trajectories, one of the two", param="num_groups")
        wants_records = body.get("records")
        if not isinstance(wants_records, bool | None):
            refuse("records", wants_records, "true or false")
        return cls(
            step=_count(body, "step", low=1),
            trainer=_trainer(body),
            num_groups=num_groups,
            num_trajectories=num_trajectories,
            wait_s=_seconds(body, "wait_s"),
            straggler_wait_s=_seconds(body, "straggler_wait_s"),
            wants_records=wants_records is not False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AcknowledgeRequest:
    """A checkpoint that contains every step up to `step` is safe: what was leased for those is trained."""

    step: int
    trainer: str | None
    checkpoint: str

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(body, ("step", "trainer", "checkpoint"))
        return cls(
            step=_count(body, "step", low=1),
            trainer=_trainer(body),
            checkpoint=as_text(body.get("checkpoint"), "checkpoint"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnRequest:
    """The trainer goes on from the checkpoint of `after_step`: what was leased for later steps waits again.

    With `adopts` it takes the gateway over from another trainer, whose fates stand; or, its own already, has lost the
    later checkpoints: what those had trained waits again, too.
    """

    after_step: int
    trainer: str | None
    adopts: bool

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(body, ("after_step", "trainer", "adopt"))
        return cls(
            after_step=_count(body, "after_step", low=0),
            trainer=_trainer(body),
            adopts=as_flag(body.get("adopt"), "adopt"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DropRequest:
    """These sessions are not to be trained."""

    session_ids: tuple[str, ...]
    reason: Drop
    trainer: str | None

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(body, ("session_ids", "reason", "trainer"))
        session_ids = as_list(body.get("session_ids"), "session_ids")
        return cls(
            session_ids=tuple(as_name(one, f"session_ids[{index}]") for index, one in enumerate(session_ids)),
            reason=as_member(Drop, body.get("reason"), "reason"),
            trainer=_trainer(body),
        )


def _count(body: JsonObject, key: str, *, low: int) -> int:
    return as_integer(body.get(key), key, low=low, high=MAX_COUNT)


def _trainer(body: JsonObject) -> str | None:
    """Who calls; a trainer that says nothing is one, too."""
    return None if body.get("trainer") is None else as_name(body["trainer"], "trainer")


def _optional_count(body: JsonObject, key: str, *, low: int) -> int | None:
    return None if body.get(key) is None else _count(body, key, low=low)


def _seconds(body: JsonObject, key: str) -> float:
    return 0.0 if body.get(key) is None else as_bounded_number(body[key], key, low=0.0, high=MAX_WAIT_S)
