"""Any engine that a run has connections to: one server or several, of whichever kind. A protocol and nothing else."""

from typing import Protocol

from areal_agent.engine.wire import EngineStats
from areal_agent.engine_types import EngineInfo
from areal_agent.protocols import Engine


class ServedEngine(Engine, Protocol):
    """Implementations: `engine.http.HttpEngine`, `engine.foreign.engine.ForeignEngine`, `engine.fleet.fleet.Fleet`."""

    async def info(self) -> EngineInfo:
        """The model that it serves, and the current weight version."""
        ...

    async def stats(self) -> EngineStats:
        """Its work."""
        ...

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        ...
