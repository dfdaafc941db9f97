"""Hands weights to an engine on the trainer's own GPU: they are copied within its memory, and never leave it.

    write ─▶ one new piece of memory ─ CudaWeights ─▶ the engine copies it, and lets go
    write ─▶ another one; that of the write before is freed once the engine has let go of it too

It knows nothing of engines and versions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_agent.engine.embedded.cuda_memory import DeviceSharing
from areal_agent.engine.embedded.weight_bytes import checksum
from areal_agent.engine_types import CudaWeights, TensorEntry
from areal_agent.weights.flat import flat_copy
from areal_agent.weights.shared_memory import check_parameters


class CudaChannel:
    """The writing side. Between two writes it holds one set of weights."""

    def __init__(self, entries: tuple[TensorEntry, ...], device: torch.device, sharing: DeviceSharing) -> None:
        """Write what `entries` tell (`shared_memory.layout`) into the memory of `device`."""
        self._entries = entries
        self._device = device
        self._sharing = sharing
        self._data: Tensor | None = None

    def write(self, parameters: Mapping[str, Tensor]) -> CudaWeights:
        """Copy the parameters, converted to the layout's dtype. Raises ValueError when they are not its own."""
        check_parameters(self._entries, parameters)
        self._data = None  # before as much is taken again
        data = self._data = flat_copy(self._entries, parameters, self._device)
        return CudaWeights(memory=self._sharing.share(data), entries=self._entries, checksum=checksum(data))

    def close(self) -> None:
        """Let go of what was written last."""
        self._data = None
