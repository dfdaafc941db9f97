"""One rollout for the page: its forest of turns as a conversation, and the tokens of one turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot
from areal_agent.ledger.questions import RolloutSummary
from areal_agent.observe.token_records import read_seen
from areal_agent.tokens.loss_rule import Mask
from areal_agent.tokens.records import sampled_spans
from areal_agent.tokens.transcript import Transcript
from areal_agent.types import Completion, JsonObject, Trajectory, Turn
from areal_agent.view.recorded import described
from areal_agent.view.session import loss_of, most_alike

MAX_SIBLINGS = 64
"""Siblings named with a rollout; a group of an evaluation has one for every task."""


def describe(snapshot: Snapshot, transcript: Transcript, run_dir: Path, session_id: str) -> JsonObject:
    """Return a rollout: what became of it, its siblings, and its turns with messages, answers and their facts.

    Raises LedgerError when there is no such session.
    """
    one, siblings, turns, trajectory = _read(snapshot, session_id)
    masks = transcript.loss_rule.masks(trajectory) if trajectory else {}
    seen = _seen(run_dir, transcript, one, trajectory)
    whole = transcript.conversations(turns)
    described_turns: list[JsonObject] = []
    for index, turn in enumerate(turns):
        known = (0, 0)
        if turn.parent is None and index:
            known = most_alike(whole[turn.id], [whole[earlier.id] for earlier in turns[:index]])
        described_turns.append(
            {
                "id": turn.id,
                "parent": turn.parent,
                "fork_at": turn.fork_at,
                "fork_reason": turn.fork_reason,
                "known": known,
                "messages": turn.request_delta or _prompt(transcript, turn),
                "sampling": turn.sampling,
                "num_prompt_tokens": len(turn.new_prompt_ids),
                "started_s": turn.started_s,
                "ended_s": turn.ended_s,
                "answers": [
                    {
                        "id": answer.id,
                        "message": transcript.message(turn, answer) if transcript.has_text else None,
                        "reward": one.rewards.by_completion.get(answer.id),
                        "logprob": sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else None,
                        "advantage": seen[answer.id].mean_advantage if answer.id in seen else None,
                        **_facts(answer, one, masks),
                    }
                    for answer in turn.completions
                ],
            }
        )
    return {
        **described(one),
        "logged": trajectory.logged if trajectory else {},
        "siblings": [described(other) for other in siblings[:MAX_SIBLINGS]],
        "num_siblings": len(siblings),
        "turns": described_turns,
    }


def tokens_of(snapshot: Snapshot, transcript: Transcript, run_dir: Path, session_id: str, turn_id: str) -> JsonObject:
    """Return the tokens of a turn: those that its prompt added, and its answers with what is known of each token.

    Raises LedgerError when there is no such session or turn.
    """
    one, _, turns, trajectory = _read(snapshot, session_id)
    turn = next((turn for turn in turns if turn.id == turn_id), None)
    if turn is None:
        raise LedgerError(f"session {session_id!r} has no turn {turn_id!r}; it has {len(turns)}, see its page")
    masks = transcript.loss_rule.masks(trajectory) if trajectory else {}
    seen = _seen(run_dir, transcript, one, trajectory)
    return {
        "session_id": session_id,
        "turn": turn_id,
        "number": turns.index(turn) + 1,
        "turns": [turn.id for turn in turns],
        "fork_at": turn.fork_at,
        "prompt": {"ids": turn.new_prompt_ids, "texts": transcript.texts_of(turn.new_prompt_ids)},
        "answers": [
            {
                "id": answer.id,
                "ids": answer.token_ids,
                "texts": transcript.texts_of(answer.token_ids),
                "logprobs": answer.logprobs,
                "seen": seen.get(answer.id),
                **_facts(answer, one, masks),
            }
            for answer in turn.completions
        ],
    }


@dataclass(frozen=True, slots=True)
class Seen:
    """What the trainer saw of the loss tokens of one answer, in the order of `places`, which count from its first."""

    places: Sequence[int]
    logprobs: Sequence[float]
    proximal: Sequence[float]
    advantages: Sequence[float]

    @property
    def mean_advantage(self) -> float | None:
        return sum(self.advantages) / len(self.advantages) if self.advantages else None


def _seen(
    run_dir: Path, transcript: Transcript, one: RolloutSummary, trajectory: Trajectory | None
) -> Mapping[str, Seen]:
    """Return what the trainer kept of a rollout, by answer; an answer in several branches is trained in parts."""
    kept = read_seen(run_dir, one.leased_step, one.session_id) if one.leased_step is not None else {}
    if not kept or trajectory is None:
        return {}
    found: dict[str, Seen] = {}
    for branch, spans in enumerate(sampled_spans(trajectory, transcript.loss_rule)):
        if branch not in kept:
            continue
        positions, *columns = kept[branch]
        for answer, (start, end) in spans.items():
            own = (positions >= start) & (positions < end)
            before = found.get(answer, Seen([], [], [], []))
            found[answer] = Seen(
                [*before.places, *(positions[own] - start).tolist()],
                [*before.logprobs, *columns[0][own].tolist()],
                [*before.proximal, *columns[1][own].tolist()],
                [*before.advantages, *columns[2][own].tolist()],
            )
    return found


def _read(
    snapshot: Snapshot, session_id: str
) -> tuple[RolloutSummary, Sequence[RolloutSummary], Sequence[Turn], Trajectory | None]:
    """Return a session, its siblings with itself, its turns, and its trajectory if it has ended."""
    turns, trajectory = questions.recorded(snapshot, session_id)
    group_id = questions.group_of(snapshot, session_id) or ""
    siblings = questions.rollouts_of(snapshot, [group_id])[group_id]
    return next(one for one in siblings if one.session_id == session_id), siblings, turns, trajectory


def _facts(answer: Completion, one: RolloutSummary, masks: Mapping[str, Mask]) -> dict[str, Any]:
    return {
        "num_tokens": len(answer.token_ids),
        "versions": [(str(span.version), span.start, span.end) for span in answer.versions],
        "finish_reason": answer.finish_reason,
        "distribution": answer.distribution,
        "loss": loss_of(answer, one, masks)[0],
    }


def _prompt(transcript: Transcript, turn: Turn) -> Sequence[JsonObject]:
    """Return the prompt of a plain completion, which has no messages, as one."""
    text = transcript.text_of(turn.new_prompt_ids)
    return [{"role": "prompt", "content": text}] if text else ()
