"""What one kind of server has to say and to do, so that there is a client of it: the seam behind `engine.py`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_agent.engine.foreign.request import Dialect
from areal_agent.engine.foreign.weights import Loader, Receiver, Served
from areal_agent.engine.transport import Transport
from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import PauseMode
from areal_agent.types import WeightVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """What a server says of itself."""

    model: Path  # that it was started with
    served: Served  # the weights that it has now
    max_context_tokens: int
    has_grammar: bool
    applies_adapters: bool = False  # every request names them


class ForeignServer(Protocol):
    """One server, spoken to in its own way. Implementations: `sglang.server.SglangServer`, `vllm.server.VllmServer`.

    Each call raises EngineUnreachable when there is no answer, or none that can be read.
    """

    @property
    def kind(self) -> str:
        """How its makers call it."""
        ...

    @property
    def transport(self) -> Transport:
        """The connections to it; whoever has the server closes them."""
        ...

    @property
    def dialect(self) -> Dialect:
        """How it is asked for a completion."""
        ...

    @property
    def loader(self) -> Loader:
        """Lets it load weights."""
        ...

    @property
    def receiver(self) -> Receiver:
        """Lets it take weights from the trainer."""
        ...

    async def state(self) -> ServerState:
        """What it says of itself."""
        ...

    async def stats(self, version: WeightVersion) -> EngineStats:
        """Its work, of a server that serves this version."""
        ...

    async def probe(self, timeout_s: float) -> None:
        """Ask something that only a scheduler answers which is alive, paused or not. Raises EngineError."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. With `wait`, this client's requests have ended before."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...
