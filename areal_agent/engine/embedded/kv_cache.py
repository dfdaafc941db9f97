"""Keys and values of every slot and layer.

Slots 0..n-1 are the n running rows, without gaps, so that a decode step reads plain views and gathers nothing. A slot
reserves addresses for all its positions; on a CPU the memory behind them comes with the first write, and `release`
gives it back. On a GPU every slot has all of its memory from the start.

Shapes: L layers, S slots, H key-value heads, P positions, D head dimension, T tokens.

How many tokens' keys and values an engine keeps, and how many requests run at once for that.

On a CPU a slot takes the memory that was written in it, so there are as many slots as were asked for. On a GPU each
slot takes its whole context at once, and the prefix cache lies beside the slots: where memory is short there are fewer
slots, which take half of it.

Keys and values of sequences that have been computed, to begin others with: a radix tree over token ids.

    root ── [system prompt] ─┬─ [question 1] ── [answer, tool output, answer]
                             └─ [question 2] ── [answer]

A node holds what its parent does not, copied out of a slot; the least recently used leaf goes first. All of it belongs
to one set of weights: whoever changes those clears it. It knows neither models nor slots nor requests.

Shapes: L layers, H key-value heads, D head dimension, T tokens.

The room for keys and values: what running rows have of it, and what is kept for rows that begin alike.

Row i holds slot i, and slots are 0..n-1 without gaps. Room is counted in tokens: that of the rows comes first, and the
prefix cache has the rest. `lengths` are the tokens of the rows that hold slots 0..n-1: prompt and sampled, computed or
not.
"""

import logging
import math
import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Optional

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.engine.config import CONTEXTS_A_SLOT, default_kv_tokens
from areal_agent.errors import ConfigError

logger = logging.getLogger(__name__)


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
        self.device = device
        self.dtype = dtype
        self.allocate()

    def allocate(self) -> None:
        """Have memory for all slots; they read as zeros. Raises OSError or RuntimeError when there is none."""
        self._hold(self._size)

    def free(self) -> None:
        """Give all memory back: there are no slots until `allocate`."""
        num_parts, _, *rest = self._size
        self._hold((num_parts, 0, *rest))

    def _hold(self, size: Sequence[int]) -> None:
        num_bytes = math.prod(size) * self.dtype.itemsize
        self._memory = _Memory(num_bytes) if num_bytes and _can_release(self.device) else None
        # Zeros, not empty: a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self._tensor = (
            torch.zeros(size, device=self.device, dtype=self.dtype)
            if self._memory is None
            else self._memory.tensor(size, self.dtype)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRoom:
    """Slots and prefix cache together keep at most `kv_tokens`."""

    num_slots: int
    kv_tokens: int
    reserved_tokens: int  # of `kv_tokens`: taken by the slots even while they are empty


def plan_room(
    *,
    num_slots: int,
    max_context_tokens: int,
    kv_tokens: int | None,
    leave_bytes: int | None,
    token_bytes: int,
    device: torch.device,
    num_sharing: int = 1,
) -> KVRoom:
    """As much as was asked for, or what fits when `leave_bytes` stay free: the part of one of `num_sharing` engines on
    the device. Raises ConfigError where not even one context fits."""
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
    if device.type != "cuda":
        return KVRoom(num_slots=num_slots, kv_tokens=kv_tokens, reserved_tokens=0)
    fitting = max(1, kv_tokens // (CONTEXTS_A_SLOT * max_context_tokens))
    if fitting < num_slots:
        logger.warning(
            "%d requests run at once and not %d: on a GPU each takes the memory of %d tokens, there is room for %d; "
            "lower max_context_tokens, or free memory",
            fitting,
            num_slots,
            max_context_tokens,
            kv_tokens,
        )
        num_slots = fitting
    return KVRoom(num_slots=num_slots, kv_tokens=kv_tokens, reserved_tokens=num_slots * max_context_tokens)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left: torch keeps it, and other processes would seem to have it
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


Ids = NDArray[np.int32]

CopyOut = Callable[[int, int], Tensor]
"""Gives the keys and values of tokens `[start, stop)`, `[2L, H, T, D]`, as a copy."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    ids: Ids  # [T]
    kv: Tensor | None  # [2L, H, T, D]; None at the root
    parent: Optional["_Node"]
    children: dict[int, "_Node"] = field(default_factory=dict[int, "_Node"])  # by their first id


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The first `num_tokens` of a sequence, part after part."""

    num_tokens: int
    parts: list[Tensor]  # each [2L, H, T, D]


class PrefixCache:
    """Holds as many tokens as it is told to. Use it from one thread."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._root = _new_root()
        # A node is used whenever one below it is, and counts as used after that one: the oldest is always a leaf.
        self._by_use: OrderedDict[_Node, None] = OrderedDict()

    def match(self, ids: Ids) -> Prefix:
        """The longest beginning of `ids` that is held. Its parts are views: copy them before anything else is held."""
        path, num_tokens = self._walk(ids)
        self._use(path)
        parts: list[Tensor] = []
        start = 0
        for node in path:
            assert node.kv is not None, "only the root has none, and no path holds it"
            parts.append(node.kv[:, :, : num_tokens - start])
            start += len(node.ids)
        return Prefix(num_tokens=num_tokens, parts=parts)

    def hold(self, ids: Ids, copy_out: CopyOut) -> None:
        """Hold a sequence from now on; what is not held yet is copied."""
        path, num_tokens = self._walk(ids)
        if num_tokens < len(ids):
            if path and (num_shared := num_tokens - sum(len(node.ids) for node in path[:-1])) < len(path[-1].ids):
                path[-1] = self._split(path[-1], num_shared)
            path.append(self._add(path[-1] if path else self._root, ids[num_tokens:], copy_out(num_tokens, len(ids))))
        self._use(path)

    def shrink(self, num_tokens: int) -> None:
        """Let the least recently used go until at most `num_tokens` are held."""
        while self.num_tokens > max(0, num_tokens):
            node, _ = self._by_use.popitem(last=False)
            assert node.parent is not None and not node.children, "the oldest node is a leaf"
            del node.parent.children[int(node.ids[0])]
            self.num_tokens -= len(node.ids)

    def clear(self) -> None:
        """Let everything go: it belongs to weights that are gone."""
        self.num_tokens = 0
        self._root = _new_root()
        self._by_use.clear()

    def _walk(self, ids: Ids) -> tuple[list[_Node], int]:
        """The nodes that `ids` begin with, the last one perhaps in part; how many ids that are."""
        node, path, position = self._root, list[_Node](), 0
        while position < len(ids) and (child := node.children.get(int(ids[position]))) is not None:
            num_shared = _num_shared(child.ids, ids[position:])
            path.append(child)
            position += num_shared
            if num_shared < len(child.ids):
                break
            node = child
        return path, position

    def _use(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _add(self, parent: _Node, ids: Ids, kv: Tensor) -> _Node:
        node = _Node(ids=ids.copy(), kv=kv, parent=parent)
        parent.children[int(ids[0])] = node
        self._by_use[node] = None
        self.num_tokens += len(ids)
        return node

    def _split(self, node: _Node, num_tokens: int) -> _Node:
        """Cut a node in two; the upper one. Both are copies, so that each frees its own memory."""
        assert node.kv is not None and node.parent is not None, "the root is never split"
        self.num_tokens -= num_tokens  # `_add` counts them again
        upper = self._add(node.parent, node.ids[:num_tokens], node.kv[:, :, :num_tokens].clone())
        node.ids, node.kv, node.parent = node.ids[num_tokens:].copy(), node.kv[:, :, num_tokens:].clone(), upper
        upper.children[int(node.ids[0])] = node
        return upper


def _new_root() -> _Node:
    return _Node(ids=np.empty(0, dtype=np.int32), kv=None, parent=None)


def _num_shared(a: Ids, b: Ids) -> int:
    """How many ids both begin with."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


HEADROOM_TOKENS = 32
"""Room that every running row keeps to grow when another one is admitted; without it they would soon be retracted."""


class SlotStore:
    """The slots of one model and its prefix cache, which share `num_tokens`. Use it from one thread."""

    def __init__(self, cache: KVCache, room: KVRoom, *, max_context_tokens: int) -> None:
        self.cache = cache
        self.prefixes = PrefixCache()
        self.num_tokens = room.kv_tokens
        self._reserved_tokens = room.reserved_tokens
        # There is room for whole contexts in all slots, so what rows compute is kept while they run.
        self.always_keeps = room.kv_tokens - room.reserved_tokens >= room.num_slots * max_context_tokens

    def can_begin(self, ids: Ids, lengths: Sequence[int]) -> bool:
        """Whether one more row has room beside those that run, which keep some to grow."""
        return sum(lengths) + len(ids) + HEADROOM_TOKENS * (len(lengths) + 1) <= self.num_tokens

    def begin(self, ids: Ids, lengths: Sequence[int]) -> int:
        """Fill the next slot with the longest known beginning of a row; returns its number of tokens. The row's last
        token is never among them."""
        self._make_room([*lengths, len(ids)])
        prefix = self.prefixes.match(ids[:-1])
        self.cache.copy_in(len(lengths), prefix.parts)
        return prefix.num_tokens

    def fit(self, lengths: Sequence[int]) -> bool:
        """Make room for rows of these lengths at the cost of the prefix cache. False: they need more than there is."""
        if sum(lengths) > self.num_tokens:
            return False
        self._make_room(lengths)
        return True

    def keep(self, slot: int, ids: Ids, lengths: Sequence[int]) -> None:
        """Copy the first tokens of a slot, which are `ids`, into the prefix cache if there is room."""
        if len(ids) <= self._num_left(lengths):
            self.prefixes.hold(ids, partial(self.cache.copy_out, slot))
            self._make_room(lengths)

    def drop(self, slot: int) -> None:
        """The row in this slot is gone: give the slot's memory back where the room is short."""
        if not self.always_keeps:
            self.cache.release(slot)

    def _make_room(self, lengths: Sequence[int]) -> None:
        self.prefixes.shrink(self._num_left(lengths))

    def _num_left(self, lengths: Sequence[int]) -> int:
        """Tokens that the prefix cache may hold beside rows of these lengths."""
        return self.num_tokens - max(sum(lengths), self._reserved_tokens)
