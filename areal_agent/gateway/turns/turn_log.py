"""The turns of one session: where a request belongs among them, and that each is durable before anyone hears of it.

Placing and recording are serialised; what lies between, the sampling, is not.
"""

import asyncio
import time
from collections.abc import Sequence

from areal_agent.gateway.services import Services
from areal_agent.gateway.turns.choice import Choice
from areal_agent.gateway.turns.packed_turn import PackedTurn
from areal_agent.gateway.turns.question import Question
from areal_agent.tokens.prompt import packed
from areal_agent.tokens.tree import Forest, Prompt
from areal_agent.types import Completion, Distribution, SamplingParams, Turn

LONG_REQUEST_BYTES = 100_000
"""From here on, placing a request leaves the event loop for a thread."""


class TurnLog:
    """All turns of a session, on their way into the journal and in it."""

    def __init__(self, session_id: str, services: Services) -> None:
        self._turns: list[PackedTurn] = []
        self.completion_ids: set[str] = set()
        self._session_id = session_id
        self._services = services
        self._forest = Forest(services.renderer)
        self._lock = asyncio.Lock()  # of the forest

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    def turns(self) -> tuple[Turn, ...]:
        """All that are in the journal."""
        return tuple(packed.unpacked() for packed in self._turns)

    async def place(self, question: Question, *, num_bytes: int) -> Prompt:
        """Where it belongs. `num_bytes`: the size of the request, roughly."""
        async with self._lock:
            if num_bytes < LONG_REQUEST_BYTES:
                return question.place(self._forest, self._services.renderer)
            return await asyncio.to_thread(question.place, self._forest, self._services.renderer)

    async def record(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        completions: Sequence[Completion],
        choices: Sequence[Choice],
        started_s: float,
    ) -> None:
        """Make a turn part of the session and of the journal; an aborted one has no choices to continue.

        Not to be cancelled: the turn would be in the one and not in the other.
        """
        sampled = [packed(completion.token_ids) for completion in completions]
        replies = [choice.reply(token_ids) for choice, token_ids in zip(choices, sampled, strict=False)]
        async with self._lock:
            fork_reason = self._forest.record(prompt, replies)
        turn = Turn(
            id=_turn_id(completions[0].id),
            parent=prompt.parent.completion_id if prompt.parent else None,
            fork_at=prompt.fork_at,
            new_prompt_ids=prompt.new_ids,
            completions=tuple(completions),
            request_delta=tuple(prompt.new_messages),
            sampling=sampling,
            started_s=started_s,
            ended_s=time.time(),
            fork_reason=fork_reason,
        )
        self._count(turn, choices)
        await self._services.journal.append_turn(self._session_id, turn)
        self._turns.append(PackedTurn.of(turn, prompt.new, sampled))
        self.completion_ids.update(completion.id for completion in completions)

    async def close(self) -> None:
        """Prove every conversation once more by rendering it whole, then forget them: nothing continues them."""
        async with self._lock:
            self._services.counters.history_mismatches += await asyncio.to_thread(self._forest.audit)
            self._forest = Forest(self._services.renderer)

    def _count(self, turn: Turn, choices: Sequence[Choice]) -> None:
        counters = self._services.counters
        counters.turns += 1
        counters.malformed_tool_calls += sum(choice.parsed.num_malformed for choice in choices)
        counters.altered_completions += sum(one.distribution is Distribution.ALTERED for one in turn.completions)
        if turn.fork_reason:
            counters.forks[turn.fork_reason] += 1


def _turn_id(completion_id: str) -> str:
    """A turn is known by its first completion: another random number would cost a system call.

    >>> _turn_id("chatcmpl-7f"), _turn_id("chatcmpl-7f-2")
    ('turn-7f', 'turn-7f-2')
    """
    return f"turn-{completion_id.partition('-')[2]}"
