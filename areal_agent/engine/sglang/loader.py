"""Lets a SGLang server load weights. Knows nothing of pushes, nor of what is in a folder."""

import asyncio
import os
from pathlib import Path

from areal_agent.engine import wire
from areal_agent.engine.sglang.info import decode_served
from areal_agent.engine.transport import Transport
from areal_agent.engine.weight_size import size_of_folder
from areal_agent.errors import WeightUpdateError


class SglangLoader:
    """`foreign.weights.Loader`. The answer is believed when the label has moved."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return self._transport.base_url

    async def load(self, folder: Path, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load a folder under a label. Raises EngineError unless it says that it serves that."""
        path = os.path.abspath(folder)  # noqa: ASYNC240 (no disk: the server has a working directory of its own)
        num_bytes = await asyncio.to_thread(size_of_folder, folder)
        await self.update(path, label, flush_cache=flush_cache, num_bytes=num_bytes)

    async def update(self, path: str, label: str, *, flush_cache: bool, num_bytes: int = 0) -> None:
        """The same of what the server knows by this name, so much from a disk."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache}
        await self._transport.post(wire.UPDATE_FROM_DISK, body, refusal=WeightUpdateError, num_bytes=num_bytes)
        answer = await self._transport.get(wire.MODEL_INFO)
        served = self._transport.decoded(decode_served, wire.MODEL_INFO, answer)
        if served.label != label:
            raise WeightUpdateError(f"{self.base_url} says that it serves {served.label} after an update to {label}")
