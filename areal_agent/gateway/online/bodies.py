"""The bodies of `/rl/publish`, `/rl/lease`, `/rl/acknowledge`, `/rl/return` and `/rl/drop`: what a trainer asks for."""

from dataclasses import dataclass
from typing import Self

from areal_agent.errors import RequestError
from areal_agent.gateway.fields import (
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
from areal_agent.types import Drop, JsonObject

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
