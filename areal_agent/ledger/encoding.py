"""Converts records to rows and back, and computes the digests that prove rows unchanged.

The round trip is exact: token ids are int32, log-probabilities float32. A row is a NamedTuple whose fields are columns
of the tables in `files.py`. A damaged row raises LedgerError.

An ending's digest proves that it is as it was written; a lease's digest proves that its tokens and rewards are
unchanged. The order in which completions and rewards are given does not matter.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self, get_type_hints

import numpy as np
import orjson
from numpy.typing import NDArray

from areal_agent.errors import LedgerError
from areal_agent.types import (
    Completion,
    Distribution,
    Drop,
    Fate,
    FinishReason,
    ForkReason,
    ImageSpan,
    JsonObject,
    Rewards,
    SamplingParams,
    Status,
    Trajectory,
    Turn,
    VersionSpan,
    WeightVersion,
)

DAMAGE = (ValueError, TypeError, KeyError, AttributeError)
"""The exceptions that decoding a damaged row raises (those of orjson and of enums are ValueErrors)."""

MAX_DEPTH = 250
"""Messages that nest more deeply may be too deep to be written as JSON."""

SampledTokens = tuple[str, Sequence[int], Sequence[float]]
"""A completion's id, its token ids [C] and their log-probabilities [C]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The ledger's record of one trajectory in a train step."""

    session_id: str
    digest: str
    num_loss_tokens: int

    @classmethod
    def of(cls, trajectory: Trajectory, num_loss_tokens: int) -> Self:
        """Make the lease of a trajectory. Takes milliseconds for a long one, to compute the digest."""
        digest = lease_digest(trajectory, num_loss_tokens)
        return cls(session_id=trajectory.session_id, digest=digest, num_loss_tokens=num_loss_tokens)


def lease_digest(trajectory: Trajectory, num_loss_tokens: int) -> str:
    """The digest of what a train step takes: the sampled tokens, the rewards, and the number of tokens in the loss."""
    return row_digest((token_digest(trajectory), *_earned(trajectory.rewards), num_loss_tokens))


def row_digest(row: Sequence[str | float | None]) -> str:
    """SHA-256, in hexadecimal, of a table row as JSON."""
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def token_digest(trajectory: Trajectory) -> str:
    """The digest of all tokens sampled in a trajectory."""
    return completions_digest(
        (completion.id, completion.token_ids, completion.logprobs)
        for turn in trajectory.turns
        for completion in turn.completions
    )


def completions_digest(completions: Iterable[SampledTokens]) -> str:
    """SHA-256, in hexadecimal, of the completions in the order of their ids.

    A completion is encoded as the length of its id in bytes, the id, the number of its tokens, their ids as int32 and
    their log-probabilities as float32. All numbers are little-endian, lengths are uint32.

    >>> a, b = ("c1", (5, 6), (-0.5, -0.25)), ("c2", (), ())
    >>> completions_digest([a, b]) == completions_digest([b, a])
    True
    """
    digest = hashlib.sha256()
    for completion_id, token_ids, logprobs in sorted(completions, key=lambda completion: completion[0]):
        name = completion_id.encode()
        digest.update(struct.pack("<I", len(name)) + name + struct.pack("<I", len(token_ids)))
        digest.update(np.asarray(token_ids, dtype="<i4").tobytes())
        digest.update(np.asarray(logprobs, dtype="<f4").tobytes())
    return digest.hexdigest()


def _earned(rewards: Rewards) -> tuple[float | None, str, str]:
    final = None if rewards.final is None else as_stored(rewards.final)
    return final, _in_order(rewards.by_completion), _in_order(rewards.parts)


def _in_order(rewards: Mapping[str, float]) -> str:
    return json.dumps([(name, as_stored(reward)) for name, reward in sorted(rewards.items())])


def as_stored(reward: float) -> float:
    """The reward as SQLite gives it back: a float, and never -0.0."""
    return float(reward) + 0.0


class TurnRow(NamedTuple):
    id: str
    parent: str | None
    fork_at: int
    fork_reason: str | None
    new_prompt_ids: bytes
    request_delta: str
    sampling: str
    started_s: float
    ended_s: float
    images: str | None = None


class CompletionRow(NamedTuple):
    id: str
    token_ids: bytes
    logprobs: bytes
    versions: str
    finish_reason: str
    distribution: str


class RewardRow(NamedTuple):
    """The columns of an ending that a late reward changes."""

    final_reward: float | None
    rewards: str
    parts: str


class EndingRow(NamedTuple):
    status: str
    error: str | None
    final_reward: float | None
    rewards: str
    parts: str
    logged: str
    undelivered: str
    ended_s: float


class StepRow(NamedTuple):
    step: int
    process: int
    incarnation: int
    sessions: str
    teacher: bytes | None
    inputs: str
    weights: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """How a train step was made: with its batch and how its process was set up, it can be made again."""

    step: int
    process: int  # the number of the run's process (`Incarnation`) that made it
    incarnation: int  # of the weights that it began with
    sessions: tuple[str, ...]  # in the order of the batch
    inputs: Mapping[str, str]  # digests of what the trainer was given, by field
    weights: str  # the digest of the weights that it made
    teacher: NDArray[np.float32] | None = None  # a server's log-probabilities of the loss tokens, [M] of all records


def encode_step(record: StepRecord) -> StepRow:
    return StepRow(
        step=record.step,
        process=record.process,
        incarnation=record.incarnation,
        sessions=_encode_json("sessions", record.sessions),
        teacher=None if record.teacher is None else record.teacher.astype("<f4").tobytes(),
        inputs=_encode_json("inputs", record.inputs),
        weights=record.weights,
    )


def decode_step(row: StepRow) -> StepRecord:
    return StepRecord(
        step=row.step,
        process=row.process,
        incarnation=row.incarnation,
        sessions=decode_strings(row.sessions),
        teacher=None if row.teacher is None else np.frombuffer(row.teacher, dtype="<f4").astype(np.float32),
        inputs=decode_object(row.inputs),
        weights=row.weights,
    )


def encode_turn(turn: Turn) -> TurnRow:
    images = [(one.digest, one.start, one.end) for one in turn.images]
    return TurnRow(
        id=turn.id,
        parent=turn.parent,
        fork_at=turn.fork_at,
        fork_reason=turn.fork_reason,
        new_prompt_ids=_encode_ids(turn.new_prompt_ids),
        request_delta=_encode_json("the messages", turn.request_delta),
        sampling=_encode_json("the sampling parameters", turn.sampling),
        started_s=turn.started_s,
        ended_s=turn.ended_s,
        images=_encode_json("the images", images) if images else None,
    )


def decode_turn(row: TurnRow, completions: Iterable[CompletionRow]) -> Turn:
    try:
        _require_types(row)
        return Turn(
            id=row.id,
            parent=row.parent,
            fork_at=_position(row.fork_at),
            fork_reason=None if row.fork_reason is None else ForkReason(row.fork_reason),
            new_prompt_ids=_decode_ids(row.new_prompt_ids),
            completions=tuple(_decode_completion(completion) for completion in completions),
            request_delta=_decode_messages(row.request_delta),
            sampling=_decode_sampling(row.sampling),
            started_s=row.started_s,
            ended_s=row.ended_s,
            images=() if row.images is None else _decode_images(row.images),
        )
    except DAMAGE as error:
        raise LedgerError(f"turn {row.id!r} is damaged: {error}") from error


def _decode_messages(text: str) -> tuple[JsonObject, ...]:
    messages: Any = orjson.loads(text)
    if text.count("[") + text.count("{") > MAX_DEPTH:
        orjson.dumps(messages)  # which nests less deeply than what is read
    for message in messages:
        calls = message.get("tool_calls") or ()
        if not all(isinstance(call.get("function") or call, dict) for call in calls):
            raise TypeError(f"its tool_calls are {calls!r:.80}, and no objects")
    return tuple(messages)


def _decode_images(text: str) -> tuple[ImageSpan, ...]:
    return tuple(
        ImageSpan(digest=str(digest), start=_position(start), end=_position(end))
        for digest, start, end in orjson.loads(text)
    )


def _position(value: object) -> int:
    if not (isinstance(value, int) and -(2**31) <= value < 2**31):
        raise ValueError(f"{value!r:.40} is no position of a token")
    return value


def _decode_sampling(text: str) -> SamplingParams:
    fields: dict[str, Any] = orjson.loads(text)
    fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
    fields["stop"] = tuple(fields.get("stop", ()))
    fields["logit_bias"] = tuple((token_id, bias) for token_id, bias in fields.get("logit_bias", ()))
    return SamplingParams(**fields)


def encode_completion(completion: Completion) -> CompletionRow:
    spans = [(str(span.version), span.start, span.end) for span in completion.versions]
    return CompletionRow(
        id=completion.id,
        token_ids=_encode_ids(completion.token_ids),
        logprobs=np.asarray(completion.logprobs, dtype="<f4").tobytes(),
        versions=_encode_json("the version spans", spans),
        finish_reason=completion.finish_reason,
        distribution=completion.distribution,
    )


def _decode_completion(row: CompletionRow) -> Completion:
    _require_types(row)
    return Completion(
        id=row.id,
        token_ids=_decode_ids(row.token_ids),
        logprobs=tuple(np.frombuffer(row.logprobs, dtype="<f4").tolist()),
        versions=tuple(
            VersionSpan(version=WeightVersion.parse(version), start=start, end=end)
            for version, start, end in orjson.loads(row.versions)
        ),
        finish_reason=FinishReason(row.finish_reason),
        distribution=Distribution(row.distribution),
    )


def encode_ending(trajectory: Trajectory) -> EndingRow:
    """Encode how a session ended; its turns have rows of their own."""
    return EndingRow(
        status=trajectory.status,
        error=trajectory.error,
        **encode_rewards(trajectory.rewards)._asdict(),
        logged=_encode_json("what was logged", dict(trajectory.logged)),
        undelivered=_encode_json("the undelivered completions", trajectory.undelivered),
        ended_s=as_stored(trajectory.ended_s),
    )


def encode_rewards(rewards: Rewards) -> RewardRow:
    return RewardRow(
        final_reward=None if rewards.final is None else as_stored(rewards.final),
        rewards=_encode_json("the rewards by completion", dict(rewards.by_completion)),
        parts=_encode_json("the reward parts", dict(rewards.parts)),
    )


def decode_status(row: EndingRow) -> Status:
    try:
        return Status(row.status)
    except DAMAGE as error:
        raise LedgerError(f"an ending is damaged: {error}") from error


def decode_rewards(row: EndingRow) -> Rewards:
    return Rewards(final=row.final_reward, by_completion=decode_object(row.rewards), parts=decode_object(row.parts))


def decode_object(text: str) -> Mapping[str, Any]:
    value = _decode_json(text)
    if not isinstance(value, dict):
        raise LedgerError(f"{text!r:.80} is not a JSON object")
    return value


def decode_strings(text: str) -> tuple[str, ...]:
    value = _decode_json(text)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise LedgerError(f"{text!r:.80} is not a JSON list of strings")
    return tuple(value)


def _decode_json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except DAMAGE as error:
        raise LedgerError(f"{text!r:.80} is not JSON: {error}") from error


def decode_fate(trained_step: int | None, dropped: str | None) -> Fate | None:
    """The fate in these columns, or None when both are NULL: there is no fate yet."""
    if trained_step is None and dropped is None:
        return None
    try:
        return Fate(trained_step=trained_step, dropped=None if dropped is None else Drop(dropped))
    except DAMAGE as error:
        raise LedgerError(f"a fate is damaged: {error}") from error


def encode_note(key: str, value: Any) -> str:
    return _encode_json(f"the note {key!r}", value)


def decode_note(key: str, text: str) -> Any:
    try:
        return orjson.loads(text)
    except DAMAGE as error:
        raise LedgerError(f"the note {key!r} is damaged: {error}") from error


def _encode_ids(token_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error:
        odd = next((one for one in token_ids if not -(2**31) <= one < 2**31), "one of them")
        raise LedgerError(f"token ids must fit int32, and {odd} does not") from None


def _decode_ids(blob: bytes) -> tuple[int, ...]:
    ids = np.frombuffer(blob, dtype="<i4")
    if ids.min(initial=0) < 0:
        raise ValueError(f"it has the token id {ids.min()}")
    return tuple(ids.tolist())


def _require_types(row: NamedTuple) -> None:
    """Raise TypeError unless each column has what it is declared to have: SQLite lets any have anything."""
    for (name, kind), value in zip(_types_of(type(row)).items(), row, strict=True):
        if not isinstance(value, kind):
            raise TypeError(f"its {name} is {value!r:.40}")


_types_of = cache(get_type_hints)


def _encode_json(what: str, value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # orjson.JSONEncodeError is a TypeError
        raise LedgerError(f"{what} cannot be written as JSON: {error}") from error
