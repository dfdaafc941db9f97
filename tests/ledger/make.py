"""Small valid records for a ledger."""

from typing import Any

from areal_agent.ledger.encoding import Lease
from areal_agent.ledger.ledger import Ledger
from areal_agent.protocols import Journal
from areal_agent.types import (
    Completion,
    ForkReason,
    SamplingParams,
    SessionRecord,
    Trajectory,
    Turn,
    VersionSpan,
    WeightVersion,
)
from tests import histories

SAMPLING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    min_p=0.1,
    frequency_penalty=0.5,
    presence_penalty=0.25,
    repetition_penalty=1.5,
    logit_bias=((5, -1.0),),
    regex="[0-9]+",
    max_tokens=8,
    stop_token_ids=(0, 2),
    stop=("END",),
    seed=3,
)
"""Parameters of which none that version 2 of the ledger knew has its default."""

SPANS = (
    VersionSpan(version=WeightVersion(step=1), start=0, end=3),
    VersionSpan(version=WeightVersion(incarnation=1, step=2), start=3, end=4),
)
"""The spans of a completion of 4 tokens that two weight versions sampled."""


class Make:
    """Makes small valid records. Turn `n` of a session continues turn `n - 1`."""

    START_S = 1_700_000_000.0

    def session(self, id: str, **changes: Any) -> SessionRecord:
        fields = {"group_id": "g000000", "task_id": "task-1", "seed": 7, "started_s": self.START_S}
        return histories.session(id, **(fields | changes))

    def completion(self, id: str, num_tokens: int = 4, step: int = 0) -> Completion:
        return histories.completion(id, (step,) * num_tokens, token_ids=tuple(range(100, 100 + num_tokens)))

    def turn(self, session_id: str, number: int = 0, **changes: Any) -> Turn:
        fields: dict[str, Any] = {
            "parent": f"{session_id}-c{number - 1}" if number else None,
            "fork_at": 7 * number,
            "new_prompt_ids": (1, 2, 3),
            "completions": (self.completion(f"{session_id}-c{number}"),),
            "request_delta": ({"role": "user", "content": "what is 2 + 2?"},),
            "sampling": SamplingParams(stop_token_ids=(0,)),
            "started_s": self.START_S + 2 * number,
            "ended_s": self.START_S + 2 * number + 1,
            "fork_reason": None if number else ForkReason.NEW_CONVERSATION,
        }
        return histories.turn(f"{session_id}-t{number}", **(fields | changes))

    def ending(self, session_id: str, **changes: Any) -> Trajectory:
        times = {"started_s": self.START_S, "ended_s": self.START_S + 1000}
        fields: dict[str, Any] = {"group_id": "g000000", "task_id": "task-1", "turns": (), **times}
        return histories.trajectory(session_id, (), 1.0, **(fields | changes))

    async def closed(self, journal: Journal, *ids: str, num_turns: int = 2, **changes: Any) -> None:
        """Record whole sessions; `changes` apply to each session."""
        for id in ids:
            await journal.open_session(self.session(id, **changes))
            for number in range(num_turns):
                await journal.append_turn(id, self.turn(id, number))
            await journal.close_session(self.ending(id))

    async def leased(self, ledger: Ledger, step: int, *ids: str) -> None:
        """Lease closed sessions, as the producer does."""
        await ledger.lease(step, [Lease.of(await ledger.trajectory(id), 8) for id in ids])
