"""Exports a ledger as one row per completion, with the whole prompt and everything recorded about it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from areal_agent.ledger import reads
from areal_agent.ledger.files import Snapshot
from areal_agent.types import (
    Completion,
    Distribution,
    FinishReason,
    ForkReason,
    SessionPurpose,
    Status,
    Trajectory,
    Turn,
    VersionSpan,
)

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompletionExport:
    """One sampled answer. Fields that are known only once the session has ended are None while it is open."""

    session_id: str
    group_id: str
    task_id: str
    purpose: SessionPurpose
    status: Status | None
    fate: str | None  # `trained(3)` or `dropped(stale)`; None: no fate yet, or an evaluation
    trained_step: int | None
    turn: str
    turn_index: int  # index of the turn in its session, in the order of recording
    parent: str | None  # the completion that the turn continues
    fork_reason: ForkReason | None
    completion_id: str
    prompt_token_ids: TokenIds  # the whole prompt, from the root
    token_ids: TokenIds
    logprobs: NDArray[np.float32]  # nats
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    distribution: Distribution
    is_delivered: bool  # False: the agent never received the answer
    reward: float | None  # of this completion
    final_reward: float | None  # of its session
    reward_parts: Mapping[str, float] | None
    messages: str  # JSON: the messages that this request added to its parent's conversation
    started_s: float
    ended_s: float


def completions(snapshot: Snapshot) -> Iterator[CompletionExport]:
    """Yield every completion: file by file, and within a file by session in the order of opening.

    Only one session is in memory at a time.
    """
    for connection in snapshot:
        for session in reads.sessions(connection):
            ending = reads.trajectory(connection, session.id) if session.is_closed else None
            turns = reads.turns(connection, session.number) if ending is None else ending.turns
            yield from _completions_of(session, turns, ending)


def _completions_of(
    session: reads.SessionHead, turns: tuple[Turn, ...], ending: Trajectory | None
) -> Iterator[CompletionExport]:
    paths: dict[str | None, TokenIds] = {None: np.empty(0, dtype=np.int32)}  # by completion id: prompt and answer
    for turn_index, turn in enumerate(turns):
        prompt = np.concatenate([paths[turn.parent][: turn.fork_at], np.asarray(turn.new_prompt_ids, dtype=np.int32)])
        for completion in turn.completions:
            export = _export(session, ending, turn_index, turn, completion, prompt)
            paths[completion.id] = np.concatenate([prompt, export.token_ids])
            yield export


def _export(
    session: reads.SessionHead,
    ending: Trajectory | None,
    turn_index: int,
    turn: Turn,
    completion: Completion,
    prompt: TokenIds,
) -> CompletionExport:
    fate = ending.fate if ending else None
    return CompletionExport(
        session_id=session.id,
        group_id=session.group_id,
        task_id=session.task_id,
        purpose=SessionPurpose(session.purpose),
        status=ending.status if ending else None,
        fate=str(fate) if fate else None,
        trained_step=fate.trained_step if fate else None,
        turn=turn.id,
        turn_index=turn_index,
        parent=turn.parent,
        fork_reason=turn.fork_reason,
        completion_id=completion.id,
        prompt_token_ids=prompt,
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs, dtype=np.float32),
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        distribution=completion.distribution,
        is_delivered=ending is None or completion.id not in ending.undelivered,
        reward=ending.rewards.by_completion.get(completion.id) if ending else None,
        final_reward=ending.rewards.final if ending else None,
        reward_parts=ending.rewards.parts if ending else None,
        messages=orjson.dumps(turn.request_delta).decode(),
        started_s=turn.started_s,
        ended_s=turn.ended_s,
    )
