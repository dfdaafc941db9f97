"""Keys and values of every slot and layer. Knows nothing of models, requests or attention.

Slots 0..n-1 are the n running rows, without gaps, so that a decode step reads plain views and gathers nothing.
Shapes: L layers, S slots, H key-value heads, P positions, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What one model needs of a cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_slots: int
    num_positions: int


class KVCache:
    """One tensor of keys and one of values a layer, `[S, H, P, D]`."""

    def __init__(self, shape: KVShape, *, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.num_slots, shape.num_kv_heads, shape.num_positions, shape.head_dim)
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN. The operating system
        # maps zero pages on first use, so positions that no row reaches cost nothing on a CPU.
        self._keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.num_layers)]
        self._values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.num_layers)]
        self._slots = torch.arange(shape.num_slots, device=device)

    def write_prompt(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Positions `[0, T)` of one slot; keys and values `[H, T, D]`."""
        num_tokens = keys.shape[1]
        self._keys[layer][slot, :, :num_tokens] = keys
        self._values[layer][slot, :, :num_tokens] = values

    def append(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """One position of each of the first n slots; positions `[n]`, keys and values `[n, H, D]`."""
        slots = self._slots[: len(positions)]
        self._keys[layer][slots, :, positions] = keys
        self._values[layer][slots, :, positions] = values

    def read(self, layer: int, start: int, stop: int, width: int) -> tuple[Tensor, Tensor]:
        """Views of slots `[start, stop)`, positions `[0, width)`: keys and values `[stop - start, H, width, D]`."""
        return self._keys[layer][start:stop, :, :width], self._values[layer][start:stop, :, :width]

    def move(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of one slot to another."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :num_positions] = tensor[source, :, :num_positions]
