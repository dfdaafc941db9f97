"""The weights of the model that serves, as pushes see them: what is taken, and how it comes to serve.

Reading and proving happen beside the model thread; only the copy in place happens in it.
"""

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor

from areal_agent.cancellation import uninterrupted
from areal_agent.engine.embedded.cuda_memory import DeviceSharing
from areal_agent.engine.embedded.scheduler import Scheduler
from areal_agent.engine.embedded.weights import WeightLayout, take_cuda_weights, take_distributed_weights, take_weights
from areal_agent.engine_types import CudaWeights, DistributedWeights, Weights
from areal_agent.errors import WeightUpdateError
from areal_agent.types import WeightVersion

Taken = Mapping[str, Tensor]


class ModelWeights:
    """A `pushes.PushTarget`."""

    def __init__(
        self, scheduler: Scheduler, layout: WeightLayout, device: torch.device, sharing: DeviceSharing
    ) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self._device = device
        self._sharing = sharing

    @property
    def version(self) -> WeightVersion:
        return self._scheduler.stats().weight_version

    async def take(self, weights: Weights) -> Taken:
        try:
            return await asyncio.to_thread(self._take, weights)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise WeightUpdateError(
                f"there is no memory to take the new weights beside those that serve: {str(error)[:200]}; leave more "
                "of it free (engine.leave_gib, --leave-gib, or fewer kv_tokens)"
            ) from error

    def _take(self, weights: Weights) -> Taken:
        if isinstance(weights, CudaWeights):
            return take_cuda_weights(weights, self._layout, self._device, self._sharing)
        if isinstance(weights, DistributedWeights):
            return take_distributed_weights(weights, self._layout, self._device)
        return take_weights(weights, self._layout, self._device)

    async def holds(self, taken: Taken) -> bool:
        return await asyncio.to_thread(self._layout.holds, taken)

    async def swap(self, taken: Taken, version: WeightVersion, *, flush_cache: bool) -> None:
        """Once handed over it happens, whether or not anyone waits for it: so it is waited for."""
        await uninterrupted(self._swap(taken, version, flush_cache))

    async def _swap(self, taken: Taken, version: WeightVersion, flush_cache: bool) -> None:
        await asyncio.wrap_future(self._scheduler.swap(taken, version, flush_cache=flush_cache))
