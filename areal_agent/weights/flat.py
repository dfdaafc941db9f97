"""A whole model's parameters as bytes in one piece of memory. It knows not where they go."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from areal_agent.engine.embedded.weight_bytes import whole_blocks
from areal_agent.engine_types import TensorEntry


def num_flat_bytes(entries: Sequence[TensorEntry]) -> int:
    """Of what `flat_copy` makes of them."""
    return whole_blocks(entries[-1].offset + entries[-1].num_bytes)


def flat_copy(entries: Sequence[TensorEntry], parameters: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The parameters where `entries` tell (`shared_memory.layout`), in its dtype: bytes `[n]`, whole blocks of them."""
    data = torch.zeros(num_flat_bytes(entries), dtype=torch.uint8, device=device)
    for entry in entries:
        place = data[entry.offset : entry.offset + entry.num_bytes].view(getattr(torch, entry.dtype))
        place.view(entry.shape).copy_(parameters[entry.name].detach())
    return data
