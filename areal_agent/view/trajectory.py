"""One rollout for the page: its forest of turns as a conversation, and the tokens of each turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from areal_agent.errors import LedgerError
from areal_agent.images import IMAGES, ImageFolder
from areal_agent.ledger import questions
from areal_agent.ledger.files import Snapshot
from areal_agent.ledger.questions import RolloutSummary
from areal_agent.observe.token_records import read_seen
from areal_agent.tokens.records import sampled_spans
from areal_agent.tokens.transcript import Transcript
from areal_agent.types import Completion, JsonObject, Trajectory, Turn
from areal_agent.view.recorded import described
from areal_agent.view.session import loss_of, most_alike, places_of

MAX_SIBLINGS = 64
"""Siblings named with a rollout, those around it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRollout:
    """A rollout as the ledger and the trainer's records have it, read once for all that is shown of it."""

    transcript: Transcript
    images: ImageFolder
    one: RolloutSummary
    siblings: Sequence[RolloutSummary]  # itself among them
    turns: Sequence[Turn]
    logged: Mapping[str, Any]
    masks: Mapping[str, str]  # by answer: why it is not in the loss
    too_old: Mapping[str, int]  # by answer: so many of its first tokens were too old for the loss
    seen: Mapping[str, Seen]  # by answer
    values: JsonObject | None  # of its turns, from fresh samples

    @classmethod
    def read(
        cls,
        snapshot: Snapshot,
        transcript: Transcript,
        run_dir: Path,
        session_id: str,
        values: JsonObject | None = None,
    ) -> Self:
        """Read a rollout. Raises LedgerError when there is no such session."""
        turns, trajectory = questions.recorded(snapshot, session_id)
        siblings = questions.siblings_of(snapshot, session_id)
        one = next(one for one in siblings if one.session_id == session_id)
        leased = transcript.loss_rule.masks(trajectory) if trajectory else {}
        return cls(
            transcript=transcript,
            images=ImageFolder(run_dir / IMAGES),
            one=one,
            siblings=siblings,
            turns=turns,
            logged=trajectory.logged if trajectory else {},
            masks=transcript.masks(trajectory) if trajectory else {},
            too_old=_too_old([answer for turn in turns for answer in turn.completions if answer.id not in leased], one),
            seen=_seen(run_dir, transcript, one, trajectory),
            values=values,
        )

    def describe(self) -> JsonObject:
        """Return what became of it, its siblings, and its turns with messages, answers and their facts."""
        whole, places = self.transcript.conversations(self.turns), places_of(self.turns)
        place = self.siblings.index(self.one)
        near = self.siblings[max(0, place - MAX_SIBLINGS // 2) :][:MAX_SIBLINGS]
        return {
            **described(self.one),
            "logged": self.logged,
            "siblings": [described(other) for other in near],
            "num_siblings": len(self.siblings),
            "values": self.values,
            "turns": [
                {
                    "id": turn.id,
                    "parent": turn.parent,
                    "fork_reason": turn.fork_reason,
                    "place": places[index],
                    "known": most_alike(turn, self.turns[:index], whole) if turn.parent is None and index else (0, 0),
                    "messages": turn.request_delta or self._prompt(turn),
                    "sampling": turn.sampling,
                    "num_prompt_tokens": len(turn.new_prompt_ids),
                    "started_s": turn.started_s,
                    "ended_s": turn.ended_s,
                    "answers": [self._answer(turn, answer) for answer in turn.completions],
                }
                for index, turn in enumerate(self.turns)
            ],
        }

    def tokens(self, turn_id: str) -> JsonObject:
        """Return the tokens that the prompt of a turn added, and its answers with what is known of each token.

        Raises LedgerError when it has no such turn.
        """
        place = next((index for index, turn in enumerate(self.turns) if turn.id == turn_id), None)
        if place is None:
            raise LedgerError(
                f"session {self.one.session_id!r} has no turn {turn_id!r}; it has {len(self.turns)}, see its page"
            )
        turn, texts_of = self.turns[place], self.transcript.texts_of
        return {
            "session_id": self.one.session_id,
            "turn": turn_id,
            "number": place + 1,
            "num_turns": len(self.turns),
            "beside": [self.turns[at].id if 0 <= at < len(self.turns) else None for at in (place - 1, place + 1)],
            "fork_at": turn.fork_at,
            "prompt": {
                "ids": turn.new_prompt_ids,
                "texts": texts_of(turn.new_prompt_ids),
                "images": turn.images,
            },
            "answers": [
                {
                    "ids": answer.token_ids,
                    "texts": texts_of(answer.token_ids),
                    "logprobs": answer.logprobs,
                    "seen": self.seen.get(answer.id),
                    **self._facts(answer),
                }
                for answer in turn.completions
            ],
        }

    def _answer(self, turn: Turn, answer: Completion) -> JsonObject:
        return {
            "message": self.transcript.message(turn, answer) if self.transcript.has_text else None,
            "reward": self.one.rewards.by_completion.get(answer.id),
            "logprob": sum(answer.logprobs) / len(answer.logprobs) if answer.logprobs else None,
            "advantage": self.seen[answer.id].mean_advantage if answer.id in self.seen else None,
            **self._facts(answer),
        }

    def _facts(self, answer: Completion) -> JsonObject:
        num_too_old, loss = 0, loss_of(answer, self.one, self.masks)[0]
        if loss == "in the loss" and (num_too_old := self.too_old.get(answer.id, 0)):
            is_old = num_too_old == len(answer.token_ids)
            loss = "not in the loss: too old" if is_old else f"in the loss but for {num_too_old:,} too old"
        return {
            "id": answer.id,
            "num_tokens": len(answer.token_ids),
            "versions": [(str(span.version), span.start, span.end) for span in answer.versions],
            "finish_reason": answer.finish_reason,
            "distribution": answer.distribution,
            "loss": loss,
            "num_too_old": num_too_old,
        }

    def _prompt(self, turn: Turn) -> Sequence[JsonObject]:
        """Return the prompt of a plain completion, which has no messages, as one."""
        text = self.transcript.text_of(turn.new_prompt_ids)
        return [{"role": "prompt", "content": text}] if text else ()


def _too_old(answers: Sequence[Completion], one: RolloutSummary) -> Mapping[str, int]:
    """Return how many tokens of each answer were too old: those of the oldest weights, of all that no mask explains.

    Weights are never older later in an answer, so they are its first tokens.
    """
    steps = sorted(step for answer in answers for step in answer.version_steps())
    num_left_out = 0 if one.num_loss_tokens is None else len(steps) - one.num_loss_tokens
    if not 0 < num_left_out < len(steps):
        return {}
    oldest = steps[num_left_out]  # of those in the loss
    return {answer.id: sum(step < oldest for step in answer.version_steps()) for answer in answers}


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
