"""An engine whose busy time is kept as spans, so that the gateways of several processes can be counted as one."""

from collections.abc import Callable

from areal_agent.engine_types import GenerateRequest, GenerateResult, TokenChunk
from areal_agent.observe.spans import SpanLog
from areal_agent.protocols import Sampler


class MeteredSampler:
    """A `protocols.Sampler` around another: `busy` has the spans with at least one request in flight."""

    def __init__(self, sampler: Sampler) -> None:
        self.busy = SpanLog()
        self._sampler = sampler

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        with self.busy.one():
            return await self._sampler.generate(request, on_chunk)

    async def abort(self, request_id: str) -> None:
        await self._sampler.abort(request_id)
