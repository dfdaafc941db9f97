"""How a vLLM server is asked for a completion: token ids in, token ids out, in events. Knows no server."""

from array import array
from typing import Any

import numpy as np

from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm.answer import VllmAnswer
from areal_agent.engine.vllm.info import ADAPTER
from areal_agent.engine.vllm.sampling import encode_sampling
from areal_agent.engine_types import GenerateRequest

GENERATE = "/inference/v1/generate"
ABORT_REQUESTS = "/abort_requests"

_PREFIX = "generate-tokens-"  # vLLM's own, in front of the id that it was given


class VllmDialect:
    """`foreign.request.Dialect`. Each request names the weights that serve when it is sent, by their label.

    That salts the cache of prefixes: keys and values that other weights have left are never taken for new ones.
    Where the server `applies_adapter`, every request names it.
    """

    path = GENERATE

    def __init__(self, *, takes_unlabelled: bool = False) -> None:
        self.applies_adapter = False
        self._takes_unlabelled = takes_unlabelled

    def encode(self, request: GenerateRequest, rid: str, label: str) -> dict[str, Any]:
        """The body of a request."""
        ids = request.input_ids
        return {
            **({"model": ADAPTER} if self.applies_adapter else {}),
            "request_id": rid,
            "token_ids": np.asarray(ids) if isinstance(ids, array) else ids,
            "sampling_params": encode_sampling(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": label,
        }

    def reader(self, request: GenerateRequest) -> VllmAnswer:
        """For the events of its answer."""
        return VllmAnswer(num_top_logprobs=request.num_top_logprobs, takes_unlabelled=self._takes_unlabelled)

    async def abort(self, transport: Transport, rid: str) -> None:
        """Let the server end a request that has begun."""
        await transport.post(ABORT_REQUESTS, {"request_ids": [_PREFIX + rid]})
