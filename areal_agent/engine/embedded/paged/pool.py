"""The memory of all pages. Knows nothing of rows, of what is free, nor of attention.

Page 0 belongs to nobody: what has to be written somewhere, and is never read, is written there.

Shapes: L layers, B pages, P positions of one page, H key-value heads, D head dimension, N tokens.
"""

import math

import torch
from torch import Tensor

from areal_agent.engine.embedded.kv_cache import KVShape

PAGE_TOKENS = 16
"""Positions of one page: a row wastes half of it on average, and rows that begin alike share whole ones."""

NOBODYS_PAGE = 0


class PagePool:
    """One tensor `[2L, B, P, H, D]`: the keys of layer l are 2l, its values 2l + 1."""

    def __init__(self, shape: KVShape, *, num_pages: int, device: torch.device, dtype: torch.dtype) -> None:
        self._size = (2 * shape.num_layers, num_pages, PAGE_TOKENS, shape.num_kv_heads, shape.head_dim)
        self.device = device
        self.dtype = dtype
        self.page_bytes = 2 * math.prod(self._size[2:]) * dtype.itemsize  # of one layer's keys and values
        self.allocate()

    def allocate(self) -> None:
        """Have memory for all pages; they read as zeros. Raises RuntimeError when there is none."""
        self._hold(self._size[1])

    def free(self) -> None:
        """Give all memory back: there are no pages until `allocate`."""
        self._hold(0)

    def _hold(self, num_pages: int) -> None:
        size = (self._size[0], num_pages, *self._size[2:])
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self._tensor = torch.zeros(size, device=self.device, dtype=self.dtype)
        parts = self._tensor.unbind(0)
        self._keys, self._values = parts[0::2], parts[1::2]

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """One position for each token; places `[N]` are page * P + position in it, keys and values `[N, H, D]`."""
        self._keys[layer].flatten(0, 1).index_copy_(0, places, keys)
        self._values[layer].flatten(0, 1).index_copy_(0, places, values)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages, `[B, P, H, D]`."""
        return self._keys[layer], self._values[layer]

    def wipe(self) -> None:
        """Make all pages read as zeros."""
        self._tensor.zero_()
