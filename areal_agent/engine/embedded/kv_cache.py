"""Keys and values of every slot and layer. Knows nothing of models, requests or attention.

Slots 0..n-1 are the n running rows, without gaps, so that a decode step reads plain views and gathers nothing. A slot
reserves addresses for all its positions; on a CPU the memory behind them comes with the first write, and `release`
gives it back.

Shapes: L layers, S slots, H key-value heads, P positions, D head dimension, T tokens.

How many tokens' keys and values an engine keeps. Pure arithmetic.
"""

import math
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_agent.engine.config import default_kv_tokens
from areal_agent.errors import ConfigError

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What one model needs of a cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """One tensor `[2L, S, H, P, D]`: the keys of layer l are 2l, its values 2l + 1."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, num_positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._size = (2 * shape.num_layers, num_slots, shape.num_kv_heads, num_positions, shape.head_dim)
        self._slots = torch.arange(num_slots, device=device)
        self._dtype = dtype
        self.allocate()

    def allocate(self) -> None:
        """Have memory for all slots; they read as zeros. Raises OSError or RuntimeError when there is none."""
        self._hold(self._size)

    def free(self) -> None:
        """Give all memory back: there are no slots until `allocate`."""
        num_parts, _, *rest = self._size
        self._hold((num_parts, 0, *rest))

    def _hold(self, size: Sequence[int]) -> None:
        device, num_bytes = self._slots.device, math.prod(size) * self._dtype.itemsize
        self._memory = _Memory(num_bytes) if num_bytes and _can_release(device) else None
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self._tensor = (
            torch.zeros(size, device=device, dtype=self._dtype)
            if self._memory is None
            else self._memory.tensor(size, self._dtype)
        )
        parts = self._tensor.unbind(0)
        self._keys, self._values = parts[0::2], parts[1::2]

    def append(self, layer: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """One position of each of the first n slots; positions `[n]`, keys and values `[n, H, D]`."""
        slots = self._slots[: len(positions)]
        self._keys[layer][slots, :, positions] = keys
        self._values[layer][slots, :, positions] = values

    def write(self, layer: int, slot: int, begin: int, keys: Tensor, values: Tensor) -> None:
        """Positions `[begin, begin + T)` of one slot; keys and values `[H, T, D]`."""
        positions = slice(begin, begin + keys.shape[1])
        self._keys[layer][slot, :, positions] = keys
        self._values[layer][slot, :, positions] = values

    def read(self, layer: int, start: int, stop: int, width: int) -> tuple[Tensor, Tensor]:
        """Views of slots `[start, stop)`, positions `[0, width)`: keys and values `[stop - start, H, width, D]`."""
        return self._keys[layer][start:stop, :, :width], self._values[layer][start:stop, :, :width]

    def copy_out(self, slot: int, start: int, stop: int) -> Tensor:
        """Positions `[start, stop)` of one slot in all layers, `[2L, H, T, D]`."""
        return self._tensor[:, slot, :, start:stop].contiguous()

    def copy_in(self, slot: int, parts: Sequence[Tensor]) -> None:
        """What `copy_out` gave, part after part from position 0 on."""
        start = 0
        for part in parts:
            stop = start + part.shape[2]
            self._tensor[:, slot, :, start:stop] = part
            start = stop

    def move(self, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of one slot to another."""
        self._tensor[:, target, :, :num_positions] = self._tensor[:, source, :, :num_positions]

    def wipe(self) -> None:
        """Make all slots read as zeros."""
        if self._memory is None:
            self._tensor.zero_()
        else:
            self.allocate()  # which writes nothing

    def release(self, slot: int) -> None:
        """Give the memory of one slot back, where the device can; it reads as zeros then."""
        if self._memory is None:
            return
        num_bytes = self._tensor[0, 0].numel() * self._tensor.itemsize
        for part in range(len(self._tensor)):
            self._memory.release((part * self._tensor.shape[1] + slot) * num_bytes, num_bytes)


class _Memory:
    """Addresses of this process whose memory comes when it is written, and goes when it is released."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._map = mmap.mmap(-1, num_bytes, flags=flags)

    def tensor(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype).view(*size)

    def release(self, start: int, num_bytes: int) -> None:
        """Whole pages inside the range only."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _can_release(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"


def plan_room(
    *,
    num_slots: int,
    max_context_tokens: int,
    kv_tokens: int | None,
    leave_bytes: int | None,
    token_bytes: int,
    device: torch.device,
    num_sharing: int = 1,
) -> int:
    """As many as was asked for, or what fits when `leave_bytes` stay free: the part of one of `num_sharing` engines on
    the device. Raises ConfigError where not even one
    context does."""
    if kv_tokens is None:
        kv_tokens = default_kv_tokens(
            is_gpu=device.type == "cuda",
            free_bytes=_free_bytes(device) if device.type == "cuda" or leave_bytes is not None else 0,  # else not asked
            all_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            leave_bytes=leave_bytes,
            num_sharing=num_sharing,
            token_bytes=token_bytes,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
        )
        remedy = "lower max_context_tokens or leave_gib, or free memory"
        remedy += f", or let fewer than {num_sharing} engines share it" if num_sharing > 1 else ""
    else:
        remedy = "raise kv_tokens, or lower max_context_tokens"
    if kv_tokens < max_context_tokens:
        raise ConfigError(
            f"there is room for the keys and values of {kv_tokens} tokens ({token_bytes} bytes each), and one request "
            f"may take max_context_tokens = {max_context_tokens}; {remedy}"
        )
    return kv_tokens


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left: torch keeps it, and other processes would seem to have it
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
