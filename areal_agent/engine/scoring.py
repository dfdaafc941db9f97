"""The log-probabilities of given tokens, by a server that runs already: what a teacher elsewhere is asked for.

The three kinds of servers are asked in their own way (`wire/generate.py`, `vllm/server.py`). Only the embedded engine
divides logits by a temperature here; SGLang and vLLM answer for temperature 1.
"""

from collections.abc import Sequence
from typing import Self

from areal_agent.engine.address import Backend, find_backend, key_of_environment
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm import server as vllm
from areal_agent.engine.wire import control, generate
from areal_agent.engine.wire.fields import as_object, get
from areal_agent.errors import ConfigError


class ScoringServer:
    """One server. Make it with `connect`, and `aclose` it."""

    def __init__(self, url: str, backend: Backend) -> None:
        self.url = url
        self._backend: Backend = backend
        # SGLang and vLLM close idle connections, perhaps just as one is used again
        self._transport = Transport(url, key=key_of_environment(), keeps_connections=backend == "embedded")

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Ask a running server for its kind. Raises EngineUnreachable."""
        return cls(url, await find_backend(url))

    async def model(self) -> str:
        """Return the folder, or the name on the hub, of the model that it was started with."""
        if self._backend == "vllm":
            started = await self._transport.get(vllm.MODELS)
            return str(self._transport.decoded(vllm.decode_started, vllm.MODELS, started).model)
        path = control.SERVER_INFO
        answer = await self._transport.get(path)
        return self._transport.decoded(lambda told: get(as_object(told, path), "model_path", str), path, answer)

    async def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """Return the log-probability of each token after position `start`, in nats, given all tokens before it.

        Raises EngineUnreachable, EngineRejected (an id that it does not know, a context that is too long), and
        ConfigError for a temperature at which it cannot answer.
        """
        if self._backend == "vllm":
            path, body = vllm.GENERATE, vllm.encode_scoring(ids)
        else:
            path, body = generate.GENERATE, generate.encode_scoring(ids, start, temperature)
        if temperature != 1.0 and self._backend != "embedded":
            raise ConfigError(
                f"algorithm.teacher.url is a server of {self._backend}, which scores tokens at temperature 1 only, and "
                f"one was sampled at {temperature:g}; set rollout.temperature to 1, or give algorithm.teacher.model"
            )
        answer = await self._transport.sample(path, body)
        decode = vllm.decode_scores if self._backend == "vllm" else generate.decode_scores
        return self._transport.decoded(lambda told: decode(told, ids, start), path, answer)

    async def aclose(self) -> None:
        await self._transport.aclose()
