"""Lets a vLLM server load weights. Knows nothing of pushes, nor of what is in a folder.

Every worker reads the folder itself, or takes what it has received from the trainer (worker_extension.py), whatever it
runs on.
"""

import asyncio
import os
from pathlib import Path

from areal_agent.engine.foreign.adapters import is_adapter
from areal_agent.engine.transport import Transport
from areal_agent.engine.vllm import LAUNCHER
from areal_agent.engine.vllm.info import WEIGHT_INFO, decode_label
from areal_agent.engine.weight_size import size_of_folder
from areal_agent.errors import EngineError, WeightUpdateError

COLLECTIVE_RPC = "/collective_rpc"
RESET_CACHE = "/reset_prefix_cache?reset_running_requests=true"
UPDATE_LABEL = "/update_weight_version"


class VllmLoader:
    """`foreign.weights.Loader`. A load does not move the label, so it is given afterwards, and read back."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return self._transport.base_url

    async def load(self, folder: Path, label: str, *, flush_cache: bool) -> None:
        """Let the paused server load a folder under a label. Raises EngineError unless it says that it serves that."""
        path = os.path.abspath(folder)  # noqa: ASYNC240 (no disk: the server has a working directory of its own)
        method = "load_adapter" if is_adapter(Path(path)) else "load_folder"
        num_bytes = await asyncio.to_thread(size_of_folder, folder)
        await self.let_workers(method, path, label, flush_cache=flush_cache, num_bytes=num_bytes)

    async def let_workers(
        self, method: str, argument: str, label: str, *, flush_cache: bool, num_bytes: int = 0
    ) -> None:
        """Let all workers load by this method of theirs, so much from a disk; the rest as in `load`.

        With `flush_cache`, running requests are taken back to their beginning: what they have is computed again.
        """
        try:
            await self._tell(COLLECTIVE_RPC, {"method": method, "args": [argument]}, num_bytes)
        except EngineError as error:
            raise WeightUpdateError(f"{error}; see its log. Was it started by {LAUNCHER}?") from error
        if flush_cache:
            await self._flush_cache()
        await self._tell(UPDATE_LABEL, {"new_version": label})
        served = self._transport.decoded(decode_label, WEIGHT_INFO, await self._transport.get(WEIGHT_INFO))
        if served != label:
            raise WeightUpdateError(f"{self.base_url} says that it serves {served} after an update to {label}")

    async def _flush_cache(self) -> None:
        answer = await self._tell(RESET_CACHE, {})
        if answer != {"success": True}:
            raise WeightUpdateError(f"{self.base_url} keeps keys and values of the weights before: {answer}")

    async def _tell(self, path: str, body: dict[str, object], num_bytes: int = 0) -> object:
        return await self._transport.post(path, body, refusal=WeightUpdateError, num_bytes=num_bytes)
