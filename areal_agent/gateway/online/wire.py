"""The bodies and answers of a trainer's calls, and a leased batch as JSON and back, without loss.

The round trip keeps every token id and the bits of every log-probability. Batches travel as trajectories, which hold
each token once; `token_records` derives the same records from them on both sides. A client without `token_records` can
ask for the records, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from areal_agent.errors import GatewayError, RequestError
from areal_agent.gateway.bodies import Body, Count, Name, Number, PositiveCount
from areal_agent.gateway.metrics import GatewayStats
from areal_agent.tokens.loss_rule import LossRule, TrainRoots
from areal_agent.tokens.records import token_records
from areal_agent.types import Drop, JsonObject, TokenRecord, TrajectoryGroup

Answer = TypeVar("Answer")

Seconds = Annotated[float, Field(ge=0, le=3600)]

_OF_THE_SAME_RELEASE = ConfigDict(extra="forbid")
"""Of answers: a field that this client does not have means that the gateway is of another release."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The state of a gateway. Its counts are of answers (rollouts), failed siblings included."""

    __pydantic_config__ = _OF_THE_SAME_RELEASE

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
    """The answer of `/rl/status`: the gateway's state, its counters since it started, and where its ledger is."""

    __pydantic_config__ = _OF_THE_SAME_RELEASE

    state: State
    stats: GatewayStats
    ledger: str  # a path on the gateway's machine


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseReply:
    """The answer of `/rl/lease`. It has no groups when there were not enough in time; then nothing is leased."""

    step: int
    groups: tuple[TrajectoryGroup, ...]
    state: State


def records_of(reply: LeaseReply, rule: LossRule) -> tuple[TokenRecord, ...]:
    """Return the token records of a lease."""
    return tuple(record for group in reply.groups for one in group.trajectories for record in token_records(one, rule))


def encode_lease(reply: LeaseReply, request: "LeaseRequest") -> bytes:
    """Encode a lease. A batch may be large: call it in a thread."""
    body: dict[str, Any] = {"step": reply.step, "groups": reply.groups, "state": reply.state}
    if request.wants_records:
        body["records"] = records_of(reply, request.loss_rule)
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_lease(body: JsonObject) -> LeaseReply:
    """Read an answer of `/rl/lease`. Raises GatewayError if it is invalid."""
    return _decode("lease", _LEASE, body)


def decode_status(body: JsonObject) -> GatewayStatus:
    """Read an answer of `/rl/status`. Raises GatewayError if it is invalid."""
    return _decode("status", _STATUS, body)


def decode_state(body: JsonObject) -> State:
    """Read a state. Raises GatewayError if it is invalid."""
    return _decode("state", _STATE, body)


_LEASE, _STATUS, _STATE = TypeAdapter(LeaseReply), TypeAdapter(GatewayStatus), TypeAdapter(State)


def _decode(what: str, kind: TypeAdapter[Answer], body: JsonObject) -> Answer:
    try:
        return kind.validate_python(body)
    except ValidationError as error:
        first = error.errors()[0]
        fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise GatewayError(f"the gateway's {what} cannot be read ({fault}); is it of the same release?") from error


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
        default=0.0, description="Seconds to wait for running groups that would be too stale for the next batch."
    )
    train_roots: Annotated[TrainRoots, Field(strict=False)] = Field(
        default=TrainRoots.ALL, description="The conversations of each session that are trained: all, or the main one."
    )
    wants_records: bool = Field(default=True, alias="records")

    @property
    def loss_rule(self) -> LossRule:
        """Which sampled tokens are trained."""
        return LossRule(roots=self.train_roots)

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
