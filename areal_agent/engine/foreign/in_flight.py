"""The requests of one client that are under way, and whether further ones may go to the server. It knows no server."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from areal_agent.engine.foreign.request import ServerRequest
from areal_agent.errors import EngineRejected


class RequestsInFlight:
    """A request is here from its call to its end, and has *begun* once it was let go to the server."""

    def __init__(self) -> None:
        self._requests: dict[str, ServerRequest] = {}  # by our ids
        self._begun: set[ServerRequest] = set()
        self._has_ended = asyncio.Event()
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> ServerRequest | None:
        """None when there is no such request."""
        return self._requests.get(request_id)

    @contextmanager
    def holding(self, request_id: str, request: ServerRequest) -> Generator[None]:
        """Count a request from here to the end of the block. Raises EngineRejected when its id is taken."""
        if request_id in self._requests:
            raise EngineRejected(f"a request {request_id!r} is in flight; give every request an id of its own")
        self._requests[request_id] = request
        try:
            yield
        finally:
            del self._requests[request_id]
            self._begun.discard(request)
            self._has_ended.set()

    async def begin(self, request: ServerRequest) -> None:
        """Return when a request may go to the server: from then on it has begun."""
        while not self._may_begin.is_set():  # a pause may follow at once on what has ended the one before
            await self._may_begin.wait()
        self._begun.add(request)

    def hold_back(self) -> None:
        """From now on requests wait."""
        self._may_begin.clear()

    def let_go(self) -> None:
        """They wait no more."""
        self._may_begin.set()

    async def end_of_begun(self) -> None:
        """Return when those have ended that have begun by now."""
        begun = set(self._begun)
        while not begun.isdisjoint(self._begun):
            self._has_ended.clear()
            await self._has_ended.wait()
