"""A turn for which the context has no room, in a session that asked for a clean stop instead of an error.

The agent gets an empty answer with finish reason `length`, as if the model had been cut off at once: a loop that stops
at `length` stops here. Nothing was sampled, so no turn is recorded, and there is no completion to reward.
"""

from collections.abc import Sequence

from areal_agent.gateway.turns.answer import TurnAnswer
from areal_agent.gateway.turns.choice import Choice
from areal_agent.gateway.turns.outlet import Outlet
from areal_agent.tokens.answers.parsed import ParsedAnswer
from areal_agent.types import Completion, Distribution, FinishReason


class TruncatedTurn:
    """Answers at once."""

    def __init__(self, *, prompt_ids: Sequence[int], completion_ids: tuple[str, ...], first_index: int) -> None:
        self.prompt_ids = prompt_ids
        self._completion_ids = completion_ids
        self._first_index = first_index

    async def run(self, outlet: Outlet | None) -> TurnAnswer:
        choices = tuple(_empty_choice(self._first_index + i, name) for i, name in enumerate(self._completion_ids))
        return TurnAnswer(prompt_ids=self.prompt_ids, choices=choices, num_cached_tokens=0)

    def hang_up(self) -> None:
        """There is nothing to stop."""


def _empty_choice(index: int, completion_id: str) -> Choice:
    completion = Completion(
        id=completion_id,
        token_ids=(),
        logprobs=(),
        versions=(),
        finish_reason=FinishReason.LENGTH,
        distribution=Distribution.EXACT,
    )
    return Choice(index=index, completion=completion, text="", parsed=ParsedAnswer(content=""))
