"""Lets the schedulers of a SGLang server take weights from the trainer (scheduler_extension.py). Knows no pushes."""

from collections.abc import Sequence

from areal_agent.engine.fields import as_object, get
from areal_agent.engine.foreign.receiving import receive
from areal_agent.engine.sglang import LAUNCHER
from areal_agent.engine.sglang.info import RECEIVED
from areal_agent.engine.sglang.loader import SglangLoader
from areal_agent.engine.transport import Transport
from areal_agent.engine_types import DistributedWeights
from areal_agent.errors import EngineError, WeightUpdateError

ACTION = "areal_agent."
CHECK_WEIGHTS = "/weights_checker"

_BETWEEN_REPLICAS = " | "  # SGLang's


class SglangReceiver:
    """`foreign.weights.Receiver`. What came is loaded as a folder is, of a name that only our schedulers know."""

    def __init__(self, transport: Transport, loader: SglangLoader) -> None:
        self._transport = transport
        self._loader = loader

    async def receive(self, push_id: str, weights: DistributedWeights, *, beside: str | None) -> None:
        """Let all schedulers receive, prove and hold these. Raises EngineError when one does not."""
        await receive(self._ask, push_id, weights, beside=beside)

    async def load_received(self, push_id: str, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load what they hold. Raises EngineError unless it says that it serves that."""
        await self._loader.update(RECEIVED + push_id, label, flush_cache=flush_cache)

    async def _ask(self, method: str, arguments: Sequence[str]) -> Sequence[str]:
        """What each replica answers to this method of its schedulers."""
        body = {"action": ACTION + method, "skip_tensor_list": arguments}
        try:
            answer = await self._transport.post(CHECK_WEIGHTS, body, refusal=WeightUpdateError)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {LAUNCHER}?") from error
        return self._transport.decoded(_messages, CHECK_WEIGHTS, answer)


def _messages(body: object) -> list[str]:
    return get(as_object(body, CHECK_WEIGHTS), "message", str).split(_BETWEEN_REPLICAS)
