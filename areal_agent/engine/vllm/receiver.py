"""Lets the workers of a vLLM server take weights from the trainer, while they sample. Knows nothing of pushes.

A worker receives in a thread of its own (worker_extension.py): a call that lasted as long would hold up the requests.
So it is asked again and again how that goes, seldomer each time.
"""

import asyncio
import secrets

import orjson

from areal_agent.engine.fields import WireError, as_object, get
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm import LAUNCHER
from areal_agent.engine.vllm.loader import COLLECTIVE_RPC, VllmLoader
from areal_agent.engine.wire.distributed_weights import encode_distributed
from areal_agent.engine_types import DistributedWeights
from areal_agent.errors import EngineError, WeightUpdateError

FIRST_LOOK_S = 0.02
LAST_LOOK_S = 0.5


class VllmReceiver:
    """`foreign.weights.Receiver`."""

    def __init__(self, transport: Transport, loader: VllmLoader) -> None:
        self._transport = transport
        self._loader = loader

    async def receive(self, push_id: str, weights: DistributedWeights, *, beside: str | None) -> None:
        """Let all workers receive, prove and hold these. Raises EngineError when one does not."""
        told = {**encode_distributed(weights), "group": secrets.token_hex(8)}
        await self._ask("receive_weights", [push_id, orjson.dumps(told).decode(), beside or ""])
        look_s = FIRST_LOOK_S
        while failures := [state for state in await self._ask("received", [push_id]) if state != "proved"]:
            if failed := [state for state in failures if state != "receiving"]:
                raise WeightUpdateError(f"{self._transport.base_url} did not take the weights: {failed[0]}")
            await asyncio.sleep(look_s)
            look_s = min(2 * look_s, LAST_LOOK_S)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load what its workers hold. Raises EngineError unless it says that it serves that."""
        await self._loader.let_workers("load_received", push_id, label, flush_cache=flush_cache)

    async def _ask(self, method: str, arguments: list[str]) -> list[str]:
        """What each worker answers to this method of its."""
        body = {"method": method, "args": arguments}
        try:
            answer = await self._transport.post(COLLECTIVE_RPC, body, refusal=WeightUpdateError)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {LAUNCHER}?") from error
        try:
            return get(as_object(answer, COLLECTIVE_RPC), "results", list)
        except WireError as error:
            raise self._transport.unreadable(COLLECTIVE_RPC, error) from error
