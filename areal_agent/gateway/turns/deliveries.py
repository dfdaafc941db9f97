"""Which answers reached their agent. What was recorded and never delivered is an orphan: nothing is to be learnt of it.

An answer counts as delivered when all of it was handed to the agent's open connection.
"""

import asyncio
import contextlib
from collections.abc import Generator, Iterable


class Deliveries:
    """The answers of one session on their way."""

    def __init__(self) -> None:
        self._undelivered: dict[str, None] = {}  # by completion id, in the order of recording
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def undelivered(self) -> tuple[str, ...]:
        """The recorded completions that have not reached their agent."""
        return tuple(self._undelivered)

    def recorded(self, completion_ids: Iterable[str]) -> None:
        """These are in the journal; until `delivered` nobody has them."""
        self._undelivered.update(dict.fromkeys(completion_ids))

    def delivered(self, completion_ids: Iterable[str]) -> None:
        for completion_id in completion_ids:
            self._undelivered.pop(completion_id, None)

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """A request, from its arrival to the last byte of its answer."""
        self._num_open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._is_idle.set()

    async def settle(self, grace_s: float) -> None:
        """Wait until no request is open, but no longer than that: an agent may be slow to take its answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
