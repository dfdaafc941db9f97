"""The bodies of `/rl/*` and `/export_trajectories`: how a rollout starts, what it earned, how it ended.

What a session has earned so far: the final reward, those of single completions, and named parts for metrics.
"""

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.gateway.bodies import (
    as_flag,
    as_integer,
    as_member,
    as_name,
    as_object,
    as_reward,
    as_shallow_object,
    as_text,
    refuse,
    refuse_unknown,
)
from areal_agent.gateway.order import MAX_SEED, WISH_FIELDS, SamplingWishes
from areal_agent.types import JsonObject, Rewards, SessionPurpose, Status

MAX_GROUP_SIZE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRequest:
    """The body of `/rl/start_session`; what it leaves out is made up."""

    session_id: str
    group_id: str
    task_id: str
    purpose: SessionPurpose
    seed: int
    sampling: SamplingWishes
    group_size: int | None  # how many siblings the group has, this one included; None: as its first session said, or 1
    truncates: bool  # a context without room is an empty answer that ends by its length, not an error

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(
            body, ("task_id", "group_id", "session_id", "purpose", "seed", "sampling", "group_size", "truncate")
        )
        session_id = _optional_name(body, "session_id") or f"session-{secrets.token_hex(8)}"
        purpose, seed, group_size = body.get("purpose"), body.get("seed"), body.get("group_size")
        return cls(
            session_id=session_id,
            group_id=_optional_name(body, "group_id") or session_id,
            task_id=as_name(body.get("task_id"), "task_id"),
            purpose=SessionPurpose.TRAIN if purpose is None else as_member(SessionPurpose, purpose, "purpose"),
            seed=_seed_of(session_id) if seed is None else as_integer(seed, "seed", low=0, high=MAX_SEED),
            sampling=_read_sampling(body),
            group_size=None if group_size is None else as_integer(group_size, "group_size", low=1, high=MAX_GROUP_SIZE),
            truncates=as_flag(body.get("truncate"), "truncate"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRequest:
    """The body of `/rl/set_reward`: the final reward, that of one completion, or a named part (for metrics only)."""

    reward: float
    completion_id: str | None
    name: str | None

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(body, ("reward", "interaction_id", "name"))
        completion_id, name = _optional_name(body, "interaction_id"), _optional_name(body, "name")
        if completion_id is not None and name is not None:
            refuse("name", name, "left out where interaction_id is given: a named part is of the whole session")
        return cls(reward=as_reward(body.get("reward"), "reward"), completion_id=completion_id, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRequest:
    """The body of `/rl/end_session`."""

    status: Status
    error: str | None
    logged: JsonObject

    @classmethod
    def read(cls, body: JsonObject) -> Self:
        refuse_unknown(body, ("status", "error", "logged"))
        status, error, logged = body.get("status"), body.get("error"), body.get("logged")
        return cls(
            status=Status.COMPLETED if status is None else as_member(Status, status, "status"),
            error=None if error is None else as_text(error, "error"),
            logged={} if logged is None else as_shallow_object(logged, "logged"),
        )


def read_export(body: JsonObject) -> str:
    """The session id in the body of `/export_trajectories`."""
    refuse_unknown(body, ("session_id",))
    return as_name(body.get("session_id"), "session_id")


def _optional_name(body: JsonObject, key: str) -> str | None:
    return None if body.get(key) is None else as_name(body[key], key)


def _read_sampling(body: JsonObject) -> SamplingWishes:
    if body.get("sampling") is None:
        return SamplingWishes()
    sampling = as_object(body["sampling"], "sampling")
    refuse_unknown(sampling, WISH_FIELDS, "sampling.")
    return SamplingWishes.read(sampling, "sampling.")


def _seed_of(session_id: str) -> int:
    return int.from_bytes(blake2b(session_id.encode(), digest_size=8).digest()) & MAX_SEED


class RewardBook:
    """The rewards of one session; those that it has already, when they come late."""

    def __init__(self, rewards: Rewards | None = None) -> None:
        rewards = rewards or Rewards()
        self._final = rewards.final
        self._by_completion = dict(rewards.by_completion)
        self._parts = dict(rewards.parts)

    def take(self, request: RewardRequest, completion_ids: Collection[str]) -> None:
        """Take a reward; said twice, the later one counts. `completion_ids`: those that can be rewarded."""
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
