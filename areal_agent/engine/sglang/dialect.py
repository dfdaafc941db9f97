"""How a SGLang server is asked for a completion. Knows no server."""

from typing import Any

from areal_agent.engine import wire
from areal_agent.engine.sglang.answer import SglangAnswer
from areal_agent.engine.transport import Transport
from areal_agent.engine_types import GenerateRequest


class SglangDialect:
    """`foreign.request.Dialect`: the common wire, but for the end of an aborted answer."""

    path = wire.GENERATE

    def __init__(self, *, takes_unlabelled: bool = False) -> None:
        self._takes_unlabelled = takes_unlabelled

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        """The body of a request. What serves needs no name."""
        del label
        return {**wire.encode_request(request, is_streamed=True), "rid": rid}

    def reader(self, request: GenerateRequest) -> SglangAnswer:
        """For the events of its answer, which needs nothing of the request."""
        del request
        return SglangAnswer(takes_unlabelled=self._takes_unlabelled)

    async def abort(self, transport: Transport, rid: str) -> None:
        """Let the server end a request that has begun."""
        await transport.post(wire.ABORT_REQUEST, wire.encode_abort(rid))
