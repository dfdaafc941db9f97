"""The seams between the parts of areal_agent, as Protocols.

gateway ── Sampler ──▶ engine          trainer ── WeightReceiver ──▶ engine
gateway ── Journal ──▶ ledger
"""

from collections.abc import Callable
from typing import Protocol

from areal_agent.types import (
    GenerateRequest,
    GenerateResult,
    PauseMode,
    SessionRecord,
    TokenChunk,
    Trajectory,
    Turn,
    Weights,
    WeightVersion,
)


class Sampler(Protocol):
    """Samples tokens. Implementations: `engine.client.HttpEngine`, `engine.fake.FakeEngine`."""

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample until a stop token, `max_tokens` or an abort. With `on_chunk`, hand tokens out as they are sampled.

        The chunks of a request, put together, are the tokens of its result; `on_chunk` must not block.
        Cancelling the call aborts the request in the engine.
        Raises EngineRejected (an id outside the vocabulary, a prompt that is too long) and EngineUnreachable.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request: its `generate` returns what it has, with finish reason `abort`. An unknown id is no error."""
        ...


class MemoryHolder(Protocol):
    """Holds memory for keys and values that a trainer on the same GPU may need for a while."""

    async def release_memory(self) -> None:
        """Free the memory. Requests wait until it is back, and lose no token."""
        ...

    async def resume_memory(self) -> None:
        """Allocate the memory again and go on. Harmless when it was not released. Raises EngineRejected if full."""
        ...


class WeightReceiver(Protocol):
    """Takes new weights in pushes while it serves. One push is open at a time; until its commit the old version serves.

    Each call raises WeightUpdateError when the old version goes on. The push is then over, unless the error is a
    PushConflict: another push is open, or this one is not.
    """

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling at a token boundary. Requests that arrive while paused wait."""
        ...

    async def resume(self) -> None:
        """Go on sampling. Harmless when not paused."""
        ...

    async def begin_push(self, push_id: str) -> None:
        """Open a push under an id that the sender chose."""
        ...

    async def send_push(self, push_id: str, weights: Weights) -> None:
        """Receive and verify all weights. Their files may be changed or deleted once this returns."""
        ...

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        """Swap the weights. Every token sampled afterwards bears `version`, which is later than the one that served."""
        ...

    async def abort_push(self, push_id: str) -> None:
        """Drop a push. One that is not open is no error."""
        ...


class Engine(Sampler, WeightReceiver, Protocol):
    """Everything that a run asks of an inference engine."""


class Journal(Protocol):
    """The gateway writes here. Each call returns when its data is durable: a crash after it loses nothing."""

    async def open_session(self, session: SessionRecord) -> None: ...

    async def append_turn(self, session_id: str, turn: Turn) -> None: ...

    async def close_session(self, trajectory: Trajectory) -> None:
        """Record rewards, status, error and end; the turns have been written before."""
        ...
