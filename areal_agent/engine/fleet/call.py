"""A call at one server that can be taken away from it. It knows neither what is asked nor who asks."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from areal_agent.errors import EngineUnreachable

T = TypeVar("T")


class Call(Generic[T]):
    """One call. Its task lives as long as `run`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None
        self._taken_away: str | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. Raises EngineUnreachable once the call has been taken away."""
        caller = asyncio.current_task()
        assert caller is not None
        num_cancelled = caller.cancelling()  # it may live on after a cancellation
        self._task = asyncio.create_task(work)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._taken_away is None or caller.cancelling() > num_cancelled:
                raise
            raise EngineUnreachable(self._taken_away) from None
        finally:
            self._task.cancel()
            await asyncio.wait({self._task})

    def take_away(self, why: str) -> None:
        """Nobody waits for the server any more. Harmless when it has answered."""
        self._taken_away = why
        if self._task is not None:
            self._task.cancel()
