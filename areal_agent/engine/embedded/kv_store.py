"""What the rows of one model keep their keys and values in, as the workload and the model see it.

Row i holds slot i, and slots are 0..n-1 without gaps. What ended or prefilled rows have computed is kept for others to
begin with, as far as there is room. Two keep this promise: slots of whole contexts on a CPU (slot_store.py), whose
memory comes with the first write, and pages on a GPU (paged/).

`lengths` are the tokens of the rows that hold slots 0..n-1: prompt and sampled, computed or not.

Keys and values of sequences that have been computed, to begin others with: a radix tree over token ids.

    root ── [system prompt] ─┬─ [question 1] ── [answer, tool output, answer]
                             └─ [question 2] ── [answer]

A node holds what its parent does not, copied out of a slot; the least recently used leaf goes first. All of it belongs
to one set of weights: whoever changes those clears it. It knows neither models nor slots nor requests.

Shapes: L layers, H key-value heads, D head dimension, T tokens.

Keys and values in slots of whole contexts, and beside them what is kept for others. What a CPU has.

Room is counted in tokens: what rows have comes first, what they do not need is prefix cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Optional, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.engine.embedded.decoder import DecodeStep, PrefillStep, Step, decode_step, prefill_step
from areal_agent.engine.embedded.kv_cache import KVCache, KVShape
from areal_agent.errors import ConfigError

Ids = NDArray[np.int32]

HEADROOM_TOKENS = 32
"""Room that every running row keeps to grow when another one is admitted; without it they would soon be retracted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Tokens of one sequence whose keys and values are to be computed: positions `[begin, begin + T)` in `slot`."""

    slot: int
    begin: int
    ids: Ids  # [T]


class StoredStep(Step, Protocol):
    """One new token for each of the first n slots."""

    @property
    def positions(self) -> Tensor:
        """Where in their sequences, `[n]`."""
        ...


class KVStore(Protocol):
    """Keys and values of slots, and of what is kept for others. Use it from one thread."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are held at most, in slots and for others together."""
        ...

    @property
    def num_kept(self) -> int:
        """Tokens that are held for others alone."""
        ...

    @property
    def always_keeps(self) -> bool:
        """Whether what a row has computed is always there for others while that row runs."""
        ...

    def num_used(self, lengths: Sequence[int]) -> int:
        """Tokens that the rows take of it."""
        ...

    def num_known(self, ids: Ids) -> int:
        """How many tokens a row of these ids would begin with."""
        ...

    def can_begin(self, ids: Ids, lengths: Sequence[int]) -> bool:
        """Whether one more row has room beside those that run, which keep theirs to grow."""
        ...

    def begin(self, ids: Ids, lengths: Sequence[int]) -> int:
        """Give a row the next slot, begun with what is known of it: how many tokens that is. Its last token is never
        among them."""
        ...

    def fit(self, lengths: Sequence[int]) -> bool:
        """Have room for rows of these lengths, at the cost of what is kept for others. False: there is none."""
        ...

    def keep(self, slot: int, ids: Ids, lengths: Sequence[int]) -> None:
        """Keep the first tokens of a slot, which are `ids`, for others, if there is room."""
        ...

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Give the row in slot `source`, of which so many tokens are computed, the slot `target`; what was there may
        be lost."""
        ...

    def drop(self, slot: int) -> None:
        """Nothing in this slot is needed any more."""
        ...

    def forget(self) -> None:
        """Keep nothing for others: it belongs to weights that are gone. Slots stay."""
        ...

    def wipe(self) -> None:
        """Make everything read as zeros; no slot may be in use."""
        ...

    def free(self) -> None:
        """Give all memory back; no slot may be in use."""
        ...

    def allocate(self) -> None:
        """Take it again. Raises OSError or RuntimeError when there is none."""
        ...

    def prefill(self, pieces: Sequence[Piece]) -> Step:
        """A step over pieces, packed in this order on one axis without padding."""
        ...

    def decode(self, lengths: Sequence[int]) -> StoredStep:
        """A step of the first n rows; `lengths` count the new token."""
        ...


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


class SlotStore:
    """A KVStore for CPUs."""

    def __init__(
        self,
        shape: KVShape,
        *,
        num_slots: int,
        max_context_tokens: int,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raises ConfigError on a GPU, where a slot would take its whole context at once."""
        if device.type != "cpu":
            raise ConfigError(
                f"engine.kv_layout is 'slots', which is for CPUs, and the device is {device}; use 'pages'"
            )
        self.num_tokens = num_tokens
        # What rows and the cache may hold together is less than all slots: memory is given back, and not all is kept.
        self._is_tight = num_tokens < num_slots * max_context_tokens
        self._prefixes = PrefixCache()
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._cache = KVCache(shape, num_slots=num_slots, num_positions=max_context_tokens, device=device, dtype=dtype)

    @property
    def num_kept(self) -> int:
        return self._prefixes.num_tokens

    @property
    def always_keeps(self) -> bool:
        return not self._is_tight

    def num_used(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def num_known(self, ids: Ids) -> int:
        return self._prefixes.match(ids).num_tokens

    def can_begin(self, ids: Ids, lengths: Sequence[int]) -> bool:
        return sum(lengths) + len(ids) + HEADROOM_TOKENS * (len(lengths) + 1) <= self.num_tokens

    def begin(self, ids: Ids, lengths: Sequence[int]) -> int:
        self._make_room([*lengths, len(ids)])
        prefix = self._prefixes.match(ids[:-1])
        self._cache.copy_in(len(lengths), prefix.parts)
        return prefix.num_tokens

    def fit(self, lengths: Sequence[int]) -> bool:
        if sum(lengths) > self.num_tokens:
            return False
        self._make_room(lengths)
        return True

    def keep(self, slot: int, ids: Ids, lengths: Sequence[int]) -> None:
        if len(ids) <= self.num_tokens - sum(lengths):
            self._prefixes.hold(ids, partial(self._cache.copy_out, slot))
            self._make_room(lengths)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        self._cache.move(source, target, num_tokens)

    def drop(self, slot: int) -> None:
        if self._is_tight:
            self._cache.release(slot)

    def forget(self) -> None:
        self._prefixes.clear()

    def wipe(self) -> None:
        self._cache.wipe()

    def free(self) -> None:
        self._cache.free()

    def allocate(self) -> None:
        self._cache.allocate()

    def prefill(self, pieces: Sequence[Piece]) -> PrefillStep:
        return prefill_step(self._cache, [(piece.slot, piece.begin, len(piece.ids)) for piece in pieces])

    def decode(self, lengths: Sequence[int]) -> DecodeStep:
        return decode_step(self._cache, lengths, like=self._like)

    def _make_room(self, lengths: Sequence[int]) -> None:
        self._prefixes.shrink(self.num_tokens - sum(lengths))
