"""Several SGLang servers as one engine. What is said of weights and pauses is said to all of them at once.

A server that fails at a push fails the push; the others serve the new weights then, and it its old ones or nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from areal_agent.engine.foreign.weight_folders import WeightFolders
from areal_agent.engine.sglang.engine import SglangEngine
from areal_agent.engine.sglang.routing import Router
from areal_agent.engine.wire import EngineStats
from areal_agent.errors import EngineRejected
from areal_agent.types import (
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    PauseMode,
    TokenChunk,
    Weights,
    WeightVersion,
)

T = TypeVar("T")


class Fleet:
    """`protocols.Engine` over one server or more, all with the same model."""

    def __init__(self, servers: Sequence[SglangEngine], router: Router | None = None) -> None:
        self.servers = tuple(servers)
        self._router = router or Router()

    @classmethod
    def of(cls, urls: Iterable[str], *, max_context_tokens: int | None = None) -> Self:
        """Clients of the servers at `urls`, not connected yet."""
        folders = WeightFolders()
        return cls([SglangEngine(url, folders=folders, max_context_tokens=max_context_tokens) for url in urls])

    async def generate(
        self, request: GenerateRequest, on_chunk: Callable[[TokenChunk], None] | None = None
    ) -> GenerateResult:
        """Sample at the server that fits best."""
        number = self._router.choose(request.input_ids, [server.num_requests for server in self.servers])
        return await self.servers[number].generate(request, on_chunk)

    async def abort(self, request_id: str) -> None:
        """End one request, wherever it is."""
        await _all(server.abort(request_id) for server in self.servers)

    async def pause(self, mode: PauseMode) -> None:
        await _all(server.pause(mode) for server in self.servers)

    async def resume(self) -> None:
        await _all(server.resume() for server in self.servers)

    async def begin_push(self, push_id: str) -> None:
        await _all(server.begin_push(push_id) for server in self.servers)

    async def send_push(self, push_id: str, weights: Weights) -> None:
        """The folder is written once for all of them."""
        await _all(server.send_push(push_id, weights) for server in self.servers)

    async def commit_push(self, push_id: str, version: WeightVersion) -> None:
        await _all(server.commit_push(push_id, version) for server in self.servers)

    async def abort_push(self, push_id: str) -> None:
        await _all(server.abort_push(push_id) for server in self.servers)

    async def load(self, model: Path, version: WeightVersion) -> None:
        """Let all serve a Hugging Face folder as `version`, whatever they have served."""
        await _all(server.load(model, version) for server in self.servers)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until all serve. Raises EngineUnreachable when one does not within `timeout_s`."""
        await _all(server.wait_ready(timeout_s) for server in self.servers)

    async def info(self) -> EngineInfo:
        """What holds for all of them. Raises EngineRejected when they serve different models."""
        infos = await _all(server.info() for server in self.servers)
        if len({info.vocab_size for info in infos}) > 1:
            models = ", ".join(sorted({info.model_path for info in infos}))
            raise EngineRejected(f"the servers of one engine serve different models: {models}; start them with one")
        return replace(
            infos[0],
            weight_version=min(info.weight_version for info in infos),
            max_context_tokens=min(info.max_context_tokens for info in infos),
            has_grammar=all(info.has_grammar for info in infos),
        )

    async def stats(self) -> EngineStats:
        """The sums over all."""
        stats = await _all(server.stats() for server in self.servers)
        return replace(
            stats[0],
            num_running=sum(one.num_running for one in stats),
            num_queued=sum(one.num_queued for one in stats),
            weight_version=min(one.weight_version for one in stats),
        )

    async def aclose(self) -> None:
        """Close the connections. Harmless when done before."""
        await _all(server.aclose() for server in self.servers)


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await all calls to their end, also when one fails; then raise the first failure."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    done: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        done.append(result)
    return done
