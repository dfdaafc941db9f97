"""One request of an agent from its place in the session to its answer: one turn, or one for each of its prompts."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from areal_agent.gateway.turns.answer import Answer, TurnAnswer
from areal_agent.gateway.turns.order import Order
from areal_agent.gateway.turns.outlet import Outlet


class RunnableTurn(Protocol):
    """A turn that has its place."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    async def run(self, outlet: Outlet | None) -> TurnAnswer: ...

    def hang_up(self) -> None: ...


class Exchange:
    """A request whose turns have their place; nothing is sampled yet."""

    def __init__(
        self, *, answer_id: str, model: str, created_s: float, order: Order, turns: Sequence[RunnableTurn]
    ) -> None:
        self.answer_id = answer_id
        self.model = model
        self.created_s = int(created_s)
        self.order = order
        self._turns = turns

    @property
    def num_choices(self) -> int:
        return len(self._turns) * self.order.num_choices

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The tokens of the first prompt."""
        return self._turns[0].prompt_ids

    async def run(self, outlet: Outlet | None = None) -> Answer:
        """Sample all turns at once; when one fails the others are ended. What is gained leaves through the outlet."""
        if len(self._turns) == 1:
            return Answer(turns=(await self._turns[0].run(outlet),))
        tasks = [asyncio.create_task(turn.run(outlet)) for turn in self._turns]
        ended, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if running:
            self.hang_up()  # not cancelled: what they have is recorded
            await asyncio.wait(running)
        failures = [error for task in (*ended, *running) if (error := task.exception()) is not None]
        if failures:
            raise failures[0]
        return Answer(turns=[task.result() for task in tasks])

    def hang_up(self) -> None:
        """Nobody waits for the answer any more: what is sampled until now is recorded as aborted."""
        for turn in self._turns:
            turn.hang_up()
