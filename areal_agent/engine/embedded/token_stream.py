"""The tokens of one streamed request on their way from the model thread to the event loop.

A reader that is slower than the model finds all that has gathered, as one chunk: nobody waits for it.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import groupby

from areal_agent.engine_types import TokenChunk, TopLogprobs
from areal_agent.types import VersionSpan, WeightVersion


class TokenStream:
    """`put` is for the model thread, all else for the loop on which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: deque[tuple[int, float, TopLogprobs, WeightVersion]] = deque()
        self._arrived = asyncio.Event()
        self._is_announced = False  # waking the loop costs a system call: once for all that gathers

    def put(self, token_id: int, logprob: float, top: TopLogprobs, version: WeightVersion) -> None:
        """Hand over one token."""
        self._tokens.append((token_id, logprob, top, version))
        if not self._is_announced:
            self._is_announced = True
            self._loop.call_soon_threadsafe(self._arrived.set)

    def end(self) -> None:
        """No token follows: whoever waits for one is woken."""
        self._arrived.set()

    async def take(self) -> TokenChunk:
        """Wait for tokens or the end; all that have come since the last call, perhaps none."""
        await self._arrived.wait()
        self._arrived.clear()
        self._is_announced = False  # before looking: a token that comes from now on announces itself
        tokens = [self._tokens.popleft() for _ in range(len(self._tokens))]
        return TokenChunk(
            token_ids=tuple(token_id for token_id, _, _, _ in tokens),
            logprobs=tuple(logprob for _, logprob, _, _ in tokens),
            top_logprobs=tuple(top for _, _, top, _ in tokens) if any(top for _, _, top, _ in tokens) else (),
            versions=_spans([version for _, _, _, version in tokens]),
        )


def _spans(versions: Sequence[WeightVersion]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    start = 0
    for version, of_one in groupby(versions):
        end = start + sum(1 for _ in of_one)
        spans.append(VersionSpan(version=version, start=start, end=end))
        start = end
    return tuple(spans)
