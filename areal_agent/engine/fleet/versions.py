"""The weight versions that a fleet has been given: a token of any other was sampled by weights that nobody here knows.

Where another process pushes, word of a version may come a moment after its first token. It knows no server.
"""

import asyncio
from collections.abc import Iterable

from areal_agent.types import VersionSpan, WeightVersion

NUM_RECENT = 4
"""What is told to others who follow: what is due, what was, and what is being committed."""


class Versions:
    """All that were ever given. Before the first one nobody has said anything, and every version is as good."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._known: dict[WeightVersion, None] = {}  # in the order in which they were given
        self._strange: set[WeightVersion] = set()  # waited for in vain
        self._has_changed = asyncio.Event()

    @property
    def recent(self) -> tuple[WeightVersion, ...]:
        """The last ones."""
        return tuple(self._known)[-NUM_RECENT:]

    def begin(self, version: WeightVersion) -> None:
        """It is served, and from now on every version that is not given is a stranger."""
        self._known[version] = None
        self._strange.discard(version)
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def add(self, version: WeightVersion) -> None:
        """It is about to be served."""
        if self._known:
            self.begin(version)

    def forget(self, version: WeightVersion) -> None:
        """It was not served after all."""
        self._known.pop(version, None)

    def knows(self, version: WeightVersion) -> bool:
        return not self._known or version in self._known

    async def stranger(self, spans: Iterable[VersionSpan]) -> VersionSpan | None:
        """The first tokens of a version that is not known, and does not become so within a while."""
        for span in spans:
            if not self.knows(span.version) and not await self._becomes_known(span.version):
                return span
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
