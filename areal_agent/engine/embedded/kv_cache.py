"""Keys and values: the slots of running rows, the prefix cache, and the room that both share.

`KVCache` has one slot per running row. Slots 0..n-1 are in use, without gaps, so that a decode step reads plain views
and gathers nothing. On a CPU a slot reserves addresses for all its positions, and memory comes with the first write
until `release` gives it back. On a GPU every slot has all of its memory from the start.

`PrefixCache` keeps keys and values of computed sequences, so that others can begin with them: a radix tree over ids.

    root ── [system prompt] ─┬─ [question 1] ── [answer, tool output, answer]
                             └─ [question 2] ── [answer]

A node holds what its parent does not, copied out of a slot; the least recently used leaf goes first. All nodes belong
to one set of weights: clear the cache when the weights change.

`SlotStore` divides the room, counted in tokens: the rows come first, and the prefix cache has the rest. It is told
how many are `used`: those of the rows in all slots, prompt and sampled, computed or not. `plan_room` decides how much
room there is; on a GPU, where each slot takes a whole context, it allows fewer slots when memory is short.

Shapes: L layers, S slots, H key-value heads, P positions, D head dimension, T tokens.
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

Ids = NDArray[np.int32]

CopyOut = Callable[[int, int], Tensor]
"""Returns a copy of the keys and values of tokens `[start, stop)`, `[2L, H, T, D]`."""

HEADROOM_TOKENS = 32
"""Tokens kept free for each running row to grow when another is admitted; otherwise rows would soon be retracted."""

_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap has from 3.13 on


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """The dimensions of a model's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """The bytes of one token's keys and values, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def whole_positions(max_context_tokens: int) -> int:
    """The positions of a slot: one more than the longest context, for tokens that nobody reads, and whole blocks of 16.

    >>> whole_positions(64)
    80
    """
    return (max_context_tokens // 16 + 1) * 16


class KVCache:
    """One tensor `[2L, S, H, P, D]`: the keys of layer l are 2l, its values 2l + 1."""

    def __init__(
        self, shape: KVShape, *, num_slots: int, num_positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._size = (2 * shape.num_layers, num_slots, shape.num_kv_heads, num_positions, shape.head_dim)
        self.num_slots, self.num_positions = num_slots, num_positions
        self.token_bytes = shape.num_bytes(dtype)
        self.slots = torch.arange(num_slots, device=device)
        self.device = device
        self.dtype = dtype
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory of all slots, as zeros. Raises OSError or RuntimeError when there is none."""
        self._hold(self._size)

    def free(self) -> None:
        """Give all memory back. There are no slots until `allocate`."""
        num_parts, _, *rest = self._size
        self._hold((num_parts, 0, *rest))

    def _hold(self, size: Sequence[int]) -> None:
        num_bytes = math.prod(size) * self.dtype.itemsize
        can_release = self.device.type == "cpu" and sys.platform == "linux"
        self._memory = _Memory(num_bytes) if num_bytes and can_release else None
        # Zeros, because a masked position weighs 0, and 0 times a stray NaN would be NaN.
        self._tensor = (
            torch.zeros(size, device=self.device, dtype=self.dtype)
            if self._memory is None
            else self._memory.tensor(size, self.dtype)
        )
        self._layers = self._tensor.unflatten(0, (-1, 2)).unbind()  # [2, S, H, P, D] each

    def put(self, layer: int, slots: Tensor, positions: Tensor, kv: Tensor) -> None:
        """Write n tokens, each at its position of its slot; slots and positions `[n]`, `kv` `[n, 2, H, D]`."""
        self._layers[layer][:, slots, :, positions] = kv

    def get(self, layer: int, slots: Tensor, positions: Tensor) -> Tensor:
        """A copy of the keys and values of n tokens, `[n, 2, H, D]`."""
        return self._layers[layer][:, slots, :, positions]

    def write(self, layer: int, slot: int, begin: int, keys: Tensor, values: Tensor) -> None:
        """Write positions `[begin, begin + T)` of one slot; keys and values `[H, T, D]`."""
        held = self._layers[layer][:, slot, :, begin : begin + keys.shape[1]]
        held[0], held[1] = keys, values

    def read(self, layer: int, start: int, stop: int, width: int) -> tuple[Tensor, Tensor]:
        """Views of slots `[start, stop)`, positions `[0, width)`: keys and values `[stop - start, H, width, D]`."""
        keys, values = self._layers[layer][:, start:stop, :, :width]
        return keys, values

    def copy_out(self, slot: int, start: int, stop: int) -> Tensor:
        """A copy of positions `[start, stop)` of one slot in all layers, `[2L, H, T, D]`."""
        return self._tensor[:, slot, :, start:stop].contiguous()

    def copy_in(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Write the results of `copy_out` one after another, from position 0 on."""
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
            self.allocate()  # mapped anew: nothing has to be written

    def release(self, slot: int) -> None:
        """Give one slot's memory back, where the device can; the slot then reads as zeros."""
        if self._memory is None:
            return
        num_bytes = self._tensor[0, 0].numel() * self._tensor.itemsize
        for part in range(len(self._tensor)):
            self._memory.release((part * self._tensor.shape[1] + slot) * num_bytes, num_bytes)


class _Memory:
    """Mapped memory that the system provides page by page at the first write, and takes back on `release`."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._map = mmap.mmap(-1, num_bytes, flags=flags)

    def tensor(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._map, dtype=dtype).view(*size)

    def release(self, start: int, num_bytes: int) -> None:
        """Give back the whole pages inside the range."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRoom:
    """The number of slots, and the tokens that slots and prefix cache hold together."""

    num_slots: int
    kv_tokens: int
    reserved_tokens: int  # the part of `kv_tokens` that the slots take even while empty


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
    """Return the room that was asked for, or that fits when `leave_bytes` stay free.

    When `num_sharing` engines share the device, it is the part of one. Raises ConfigError when not even one context
    fits.
    """
    if kv_tokens is None:
        kv_tokens = default_kv_tokens(
            is_gpu=device.type == "cuda",
            free_bytes=_free_bytes(device) if device.type == "cuda" or leave_bytes is not None else 0,  # else unused
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
        torch.cuda.empty_cache()  # torch keeps freed memory, which would look taken
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(kw_only=True, slots=True, eq=False)
class _Node:
    ids: Ids  # [T]
    kv: Tensor | None  # [2L, H, T, D]; None at the root
    parent: Optional["_Node"]
    children: dict[int, "_Node"] = field(default_factory=dict[int, "_Node"])  # by the first id of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The keys and values of a sequence's first `num_tokens` tokens, in parts."""

    num_tokens: int
    parts: list[Tensor]  # each [2L, H, T, D]


class PrefixCache:
    """A radix tree of computed sequences. `shrink` bounds it. Use it from one thread."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop everything: it belongs to old weights."""
        self.num_tokens = 0
        self._root = _Node(ids=np.empty(0, dtype=np.int32), kv=None, parent=None)
        # In order of use. A node counts as used whenever one below it is, and after it: the oldest is always a leaf.
        self._by_use: OrderedDict[_Node, None] = OrderedDict()

    def match(self, ids: Ids) -> Prefix:
        """The longest held beginning of `ids`. Its parts are views: copy them before the cache changes."""
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
        """Hold a sequence; only the part not held yet is copied."""
        path, num_tokens = self._walk(ids)
        if num_tokens < len(ids):
            if path and (num_shared := num_tokens - sum(len(node.ids) for node in path[:-1])) < len(path[-1].ids):
                path[-1] = self._split(path[-1], num_shared)
            path.append(self._add(path[-1] if path else self._root, ids[num_tokens:], copy_out(num_tokens, len(ids))))
        self._use(path)

    def shrink(self, num_tokens: int) -> None:
        """Drop the least recently used nodes until at most `num_tokens` are held."""
        while self.num_tokens > max(0, num_tokens):
            node, _ = self._by_use.popitem(last=False)
            assert node.parent is not None and not node.children, "the oldest node is a leaf"
            del node.parent.children[int(node.ids[0])]
            self.num_tokens -= len(node.ids)

    def _walk(self, ids: Ids) -> tuple[list[_Node], int]:
        """The nodes along `ids`, the last one perhaps matched in part, and the number of ids matched."""
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
        """Cut a node in two and return the upper one. Both are copies, so that each frees its own memory."""
        assert node.kv is not None and node.parent is not None, "the root is never split"
        self.num_tokens -= num_tokens  # `_add` counts them again
        upper = self._add(node.parent, node.ids[:num_tokens], node.kv[:, :, :num_tokens].clone())
        node.ids, node.kv, node.parent = node.ids[num_tokens:].copy(), node.kv[:, :, num_tokens:].clone(), upper
        upper.children[int(node.ids[0])] = node
        return upper


def _num_shared(a: Ids, b: Ids) -> int:
    """The number of ids with which both begin."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


class SlotStore:
    """The slots of one model and its prefix cache, which share `num_tokens`. Use it from one thread."""

    def __init__(self, cache: KVCache, room: KVRoom, *, max_context_tokens: int) -> None:
        self.cache = cache
        self.prefixes = PrefixCache()
        self.num_tokens = room.kv_tokens
        self._reserved_tokens = room.reserved_tokens
        # With room for whole contexts in all slots, the prefix cache keeps what rows compute while they run.
        self.always_keeps = room.kv_tokens - room.reserved_tokens >= room.num_slots * max_context_tokens

    def can_begin(self, ids: Ids, used: int, num_rows: int) -> bool:
        """Return whether another row fits beside the running ones, with headroom for each to grow."""
        return used + len(ids) + HEADROOM_TOKENS * (num_rows + 1) <= self.num_tokens

    def begin(self, slot: int, ids: Ids, used: int) -> int:
        """Fill a slot with the longest known beginning of a row, and return its number of tokens.

        It never includes the row's last token.
        """
        self._make_room(used + len(ids))
        prefix = self.prefixes.match(ids[:-1])
        self.cache.copy_in(slot, prefix.parts)
        return prefix.num_tokens

    def fit(self, used: int) -> bool:
        """Make room for the rows by shrinking the prefix cache. False when they need more than all."""
        if used > self.num_tokens:
            return False
        self._make_room(used)
        return True

    def keep(self, slot: int, ids: Ids, used: int) -> None:
        """Copy the first tokens of a slot, whose ids are `ids`, into the prefix cache if there is room."""
        if len(ids) <= self._num_left(used):
            self.prefixes.hold(ids, partial(self.cache.copy_out, slot))
            self._make_room(used)

    def drop(self, slot: int) -> None:
        """Give back the memory of a slot whose row is gone, where room is short."""
        if not self.always_keeps:
            self.cache.release(slot)

    def _make_room(self, used: int) -> None:
        self.prefixes.shrink(self._num_left(used))

    def _num_left(self, used: int) -> int:
        """The number of tokens that the prefix cache may hold beside the rows."""
        return self.num_tokens - max(used, self._reserved_tokens)
