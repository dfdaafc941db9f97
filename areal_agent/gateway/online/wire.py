"""The bodies and answers of a trainer's calls, and a leased batch as JSON and back, without loss.

The round trip keeps every token id and the bits of every log-probability. Batches travel as trajectories, which hold
each token once; `token_records` derives the same records from them on both sides. A client without `token_records` can
ask for the records, too.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import orjson
from pydantic import Field, model_validator

from areal_agent.errors import GatewayError, RequestError
from areal_agent.gateway.bodies import Body, Count, Name, Number, PositiveCount
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

Seconds = Annotated[float, Field(ge=0, le=3600)]


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state of a gateway. Its counts are of answers (rollouts), failed siblings included."""

    trainer: str | None  # the name of its trainer; None: nobody yet, or a trainer without a name
    published: int  # the weight version that serves, as the trainer said
    leased: int  # the last train step that a batch was leased for
    num_running: Number
    num_finished: Number
    rolling_s: Annotated[float, Field(ge=0)]  # seconds with a training session open since the gateway started
    capacity: Number | None  # answers that may still be started; None: no trainer has named a bound yet
    statuses: Mapping[str, Number]  # of sessions that ended since the gateway started
    drops: Mapping[str, Number]  # of sessions dropped since the gateway started, by reason


@dataclass(frozen=True, kw_only=True, slots=True)
class StateReply:
    """The answer of `/rl/publish`, `/rl/acknowledge` and `/rl/drop`."""

    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnReply:
    """The answer of `/rl/return`."""

    num_returned: Number
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayStatus:
    """The answer of `/rl/status`: the gateway's state, and its counters since it started."""

    state: State
    stats: GatewayStats


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """The answer of `/rl/lease`. It has no groups when there were not enough in time; then nothing is leased."""

    step: int
    groups: tuple[TrajectoryGroup, ...]
    state: State


async def encode_lease(reply: LeaseReply, *, with_records: bool) -> bytes:
    """Encode a lease in a thread, because a batch may be large."""
    return await asyncio.to_thread(_encode_lease, reply, with_records)


def _encode_lease(reply: LeaseReply, with_records: bool) -> bytes:
    body: dict[str, Any] = {"step": reply.step, "groups": reply.groups, "state": reply.state}
    if with_records:
        body["records"] = [
            record for group in reply.groups for one in group.trajectories for record in token_records(one)
        ]
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_lease(body: JsonObject) -> LeaseReply:
    """Read an answer of `/rl/lease`. Raises GatewayError if it is invalid."""
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
    """Read an answer of `/rl/status`. Raises GatewayError if it is invalid."""
    try:
        fields = dict(body["stats"])
        fields["forks"] = {ForkReason(reason): number for reason, number in fields["forks"].items()}
        fields["errors"] = {int(status): number for status, number in fields["errors"].items()}
        return GatewayStatus(state=decode_state(body["state"]), stats=GatewayStats(**fields))
    except DAMAGE as error:
        raise GatewayError(f"the gateway's status cannot be read: {error!r}; is it of the same release?") from error


def decode_state(body: JsonObject) -> State:
    """Read a state. Raises GatewayError if it is invalid."""
    try:
        return State(**body)
    except DAMAGE as error:
        raise GatewayError(f"the gateway's state cannot be read: {error!r}; is it of the same release?") from error


def decode_trajectory(body: JsonObject) -> Trajectory:
    """Read a trajectory from orjson's encoding of it."""
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


class TrainerRequest(Body):
    """Fields of every trainer's call."""

    trainer: Name | None = Field(
        default=None, description="The name of the trainer. Calls without a name count as one trainer."
    )


class PublishRequest(TrainerRequest):
    """Announces that version `step` serves now.

    `batch_answers` and `max_staleness` name the staleness bound; give both or none. `incarnation` is the first half of
    the engine's version labels; without it, every label counts as the trainer's.
    """

    step: Count
    incarnation: Count | None = None
    batch_answers: PositiveCount | None = None
    max_staleness: Count | None = None

    @model_validator(mode="after")
    def _names_a_whole_bound(self) -> Self:
        if (self.batch_answers is None) != (self.max_staleness is None):
            missing = "batch_answers" if self.batch_answers is None else "max_staleness"
            raise RequestError(
                f"{missing} is missing; the staleness bound needs both batch_answers and max_staleness", param=missing
            )
        return self


class LeaseRequest(TrainerRequest):
    """Asks for whole groups for train step `step`: `num_groups`, or enough to hold `num_trajectories`."""

    step: PositiveCount
    num_groups: PositiveCount | None = None
    num_trajectories: PositiveCount | None = None
    wait_s: Seconds = Field(default=0.0, description="Seconds to wait for enough groups.")
    straggler_wait_s: Seconds = Field(
        default=0.0,
        description="Seconds to wait for running groups that would be too stale for the next batch.",
    )
    wants_records: bool = Field(default=True, alias="records")

    @model_validator(mode="after")
    def _asks_in_one_way(self) -> Self:
        if (self.num_groups is None) == (self.num_trajectories is None):
            raise RequestError("give either num_groups or num_trajectories", param="num_groups")
        return self


class AcknowledgeRequest(TrainerRequest):
    """Reports a checkpoint that contains every step up to `step`: what was leased for those is trained."""

    step: PositiveCount
    checkpoint: str


class ReturnRequest(TrainerRequest):
    """Resumes from the checkpoint of `after_step`: what was leased for later steps waits again.

    With `adopt` the caller takes the gateway over from another trainer, and what that one trained stays trained. If it
    is the caller's already, `adopt` says that its later checkpoints are lost: what those had trained waits again.
    """

    after_step: Count
    adopts: bool = Field(default=False, alias="adopt")


class DropRequest(TrainerRequest):
    """Drops sessions: they will not be trained."""

    session_ids: list[Name]
    reason: Annotated[Drop, Field(strict=False)]


class StatusRequest(Body):
    """The empty body of `/rl/status`."""
