"""The bodies of `/rl/*` and `/export_trajectories`, and the rewards of a session.

A session earns a final reward, rewards of single completions, and named parts for metrics (`RewardBook`).
"""

import secrets
from collections.abc import Collection
from hashlib import blake2b
from typing import Annotated, Any, Self

from pydantic import Field, PlainValidator, model_validator

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import Body, Name, ShallowObject, refuse, wrong
from areal_agent.gateway.order import MAX_SEED, SamplingWishes
from areal_agent.types import MAX_REWARD, Rewards, SessionPurpose, Status

MAX_GROUP_SIZE = 2**16


def _new_session_id() -> str:
    return f"session-{secrets.token_hex(8)}"


def _seed_of(fields: dict[str, Any]) -> int:
    digest = blake2b(fields["session_id"].encode(), digest_size=8).digest()
    return int.from_bytes(digest) & MAX_SEED


def _read_reward(value: object) -> float:
    """Read a finite number that a trainer can add up; true and false become 1 and 0."""
    if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        remedy = "; scale it down" if isinstance(value, int | float) else ""
        raise wrong(f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}, or a boolean{remedy}")
    return float(value)


Reward = Annotated[
    float,
    PlainValidator(_read_reward, json_schema_input_type=Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)] | bool),
]


class StartRequest(Body):
    """The start of a rollout. Fields that are left out get defaults."""

    session_id: Name = Field(default_factory=_new_session_id)
    group_id: Name = Field(default_factory=lambda fields: fields["session_id"])
    task_id: Name
    purpose: Annotated[SessionPurpose, Field(strict=False)] = SessionPurpose.TRAIN
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = Field(default_factory=_seed_of)
    sampling: SamplingWishes = SamplingWishes()
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] | None = Field(
        default=None,
        description="The number of sessions in the group, this one included. Default: that of its first session, or 1. "
        "Only where a trainer leases from this gateway.",
    )
    truncates: bool = Field(
        default=False, alias="truncate", description="With a full context, return an empty answer instead of an error."
    )


class RewardRequest(Body):
    """A reward: of the whole session, of one completion (`interaction_id`), or a named part for metrics (`name`)."""

    reward: Reward
    completion_id: Name | None = Field(default=None, alias="interaction_id")
    name: Name | None = None

    @model_validator(mode="after")
    def _is_of_one_thing(self) -> Self:
        if self.completion_id is not None and self.name is not None:
            refuse("name", self.name, "left out where interaction_id is given: a named part is of the whole session")
        return self


class EndRequest(Body):
    """The end of a session."""

    status: Annotated[Status, Field(strict=False)] = Status.COMPLETED
    error: str | None = None
    logged: ShallowObject = Field(default_factory=dict[str, Any])


class ExportRequest(Body):
    """The session to export."""

    session_id: Name


class RewardBook:
    """The rewards of one session; it may begin with those that an ended session already has."""

    def __init__(self, rewards: Rewards | None = None) -> None:
        rewards = rewards or Rewards()
        self._final = rewards.final
        self._by_completion = dict(rewards.by_completion)
        self._parts = dict(rewards.parts)

    def take(self, request: RewardRequest, completion_ids: Collection[str]) -> None:
        """Take a reward; a later one for the same thing replaces it. `completion_ids` are the session's."""
        if request.completion_id is not None and request.completion_id not in completion_ids:
            raise RequestError(
                f"this session has no completion {request.completion_id!r}; use the id of a chat completion of this "
                "session (with n > 1: that id and '-0', '-1' ...)",
                param="interaction_id",
                code="interaction_not_found",
            )
        if request.name is not None:
            self._parts[request.name] = request.reward
        elif request.completion_id is not None:
            self._by_completion[request.completion_id] = request.reward
        else:
            self._final = request.reward

    def rewards(self) -> Rewards:
        return Rewards(final=self._final, by_completion=dict(self._by_completion), parts=dict(self._parts))
