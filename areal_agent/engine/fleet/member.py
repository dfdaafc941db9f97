"""One server of a fleet: its client, what is known of it, and the calls that it has in hand. It decides nothing."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from areal_agent.engine.fleet.call import Call
from areal_agent.engine.served import ServedEngine
from areal_agent.types import WeightVersion

T = TypeVar("T")


class MemberEngine(ServedEngine, Protocol):
    """The client of one server. Implementations: `engine.http.HttpEngine`, `engine.foreign.engine.ForeignEngine`."""

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        ...

    async def health(self) -> bool:
        """Whether it may be asked to sample."""
        ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until it serves. Raises EngineUnreachable when it does not within `timeout_s`."""
        ...

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Serve a Hugging Face folder as `version`, whatever was served before."""
        ...


class MemberState(StrEnum):
    """Whether a server gets requests."""

    SERVING = "serving"
    QUARANTINED = "quarantined"  # it failed, hangs, or is behind; it is asked again and again
    CATCHING_UP = "catching_up"  # it answers: it is verified, and given the weights of the fleet
    LEAVING = "leaving"  # it is being removed: what it has in hand ends or moves


@dataclass(kw_only=True, slots=True, eq=False)
class Member:
    """What `roster.py` decides of it is in `state` and `reason`."""

    engine: MemberEngine
    state: MemberState = MemberState.SERVING
    reason: str = ""  # why it does not serve
    version: WeightVersion | None = None  # that it served when it was last asked
    lag: int = 0  # how often in a row it was found with an earlier version than others
    is_loading: bool = False  # it loads weights, and may be silent meanwhile
    num_requests: int = 0
    heard_s: float = field(default_factory=time.monotonic)  # when it has last answered, or sampled a token
    looked_after: asyncio.Event = field(default_factory=asyncio.Event)  # set: its keeper has to look now
    _calls: dict[Call[Any], None] = field(default_factory=dict[Call[Any], None])

    @property
    def url(self) -> str:
        return self.engine.base_url

    async def ask(self, work: Callable[[MemberEngine], Coroutine[Any, Any, T]], call: Call[T] | None = None) -> T:
        """Await a call at the server. Raises EngineUnreachable when it is taken away from it."""
        call = call or Call[T]()
        self._calls[call] = None
        try:
            return await call.run(work(self.engine))
        finally:
            del self._calls[call]

    def take_away_all(self, why: str) -> None:
        """Nobody waits for this server any more."""
        for call in self._calls:
            call.take_away(f"{self.url} {why}")
