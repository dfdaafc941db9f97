"""Lets the workers of a vLLM server take weights from the trainer (worker_extension.py). Knows nothing of pushes."""

from collections.abc import Sequence

from areal_agent.engine.fields import as_object, get
from areal_agent.engine.foreign.receiving import receive
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm import LAUNCHER
from areal_agent.engine.vllm.loader import COLLECTIVE_RPC, VllmLoader
from areal_agent.engine_types import DistributedWeights
from areal_agent.errors import EngineError, WeightUpdateError


class VllmReceiver:
    """`foreign.weights.Receiver`."""

    def __init__(self, transport: Transport, loader: VllmLoader) -> None:
        self._transport = transport
        self._loader = loader

    async def receive(self, push_id: str, weights: DistributedWeights, *, beside: str | None) -> None:
        """Let all workers receive, prove and hold these. Raises EngineError when one does not."""
        await receive(self._ask, push_id, weights, beside=beside)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load what its workers hold. Raises EngineError unless it says that it serves that."""
        await self._loader.let_workers("load_received", push_id, label, flush_cache=flush_cache)

    async def _ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """What each worker answers to this method of its."""
        body = {"method": method, "args": arguments}
        try:
            answer = await self._transport.post(COLLECTIVE_RPC, body, refusal=WeightUpdateError)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {LAUNCHER}?") from error
        return self._transport.decoded(_results, COLLECTIVE_RPC, answer)


def _results(body: object) -> list[str]:
    return get(as_object(body, COLLECTIVE_RPC), "results", list)
