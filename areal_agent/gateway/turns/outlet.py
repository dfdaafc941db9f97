"""What answers gain, on its way from the engine to whoever writes it. It knows neither."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from areal_agent.gateway.turns.draft import Gain


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one answer gained; `index` is its place among the answers of the request."""

    index: int
    gain: Gain


class Outlet:
    """Put pieces in at any time; take them out in batches: what came while the last batch was written leaves at once.

    It holds no more than the answers themselves, so nobody has to wait to put something in.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._is_closed = False
        self._has_news = asyncio.Event()

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._has_news.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._is_closed = True
        self._has_news.set()

    async def has_begun(self) -> bool:
        """Wait for the first piece; false when it was closed without one."""
        await self._has_news.wait()
        return bool(self._pieces)

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """All pieces, until it is closed and empty."""
        while self._pieces or not self._is_closed:
            await self._has_news.wait()
            self._has_news.clear()
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield pieces
