"""The weight versions that a fleet has been given: a token of any other was sampled by weights that nobody here knows.

Where another process pushes, word of a version may come a moment after its first token. It knows no server.
"""

import asyncio
from collections.abc import Iterable

from areal_agent.types import VersionSpan, WeightVersion


class Versions:
    """All that were ever given. Before the first one nobody has said anything, and every version is as good."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._known: set[WeightVersion] = set()
        self._strange: set[WeightVersion] = set()  # waited for in vain
        self._has_changed = asyncio.Event()

    def begin(self, version: WeightVersion) -> None:
        """It is served, and from now on every version that is not given is a stranger."""
        self._known.add(version)
        self._strange.discard(version)
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def add(self, version: WeightVersion) -> None:
        """It is about to be served."""
        if self._known:
            self.begin(version)

    def forget(self, version: WeightVersion) -> None:
        """It was not served after all."""
        self._known.discard(version)

    def knows(self, version: WeightVersion) -> bool:
        return not self._known or version in self._known

    async def stranger(self, spans: Iterable[VersionSpan]) -> VersionSpan | None:
        """The first tokens of one answer that no server of this fleet should have sampled.

        Their version is not known, and does not become so within a while; or it is earlier than that of the tokens
        before: their server was started again, say, and nobody has noticed yet.
        """
        newest = WeightVersion()
        for span in spans:
            if span.version < newest or not (self.knows(span.version) or await self._becomes_known(span.version)):
                return span
            newest = span.version
        return None

    async def _becomes_known(self, version: WeightVersion) -> bool:
        if version in self._strange:
            return False
        try:
            async with asyncio.timeout(self._wait_s):
                while not self.knows(version):
                    await self._has_changed.wait()
        except TimeoutError:
            self._strange.add(version)
            return False
        return True
