"""Keys and values of sequences that have been computed, to begin others with: a radix tree over token ids.

    root ── [system prompt] ─┬─ [question 1] ── [answer, tool output, answer]
                             └─ [question 2] ── [answer]

A node holds what its parent does not, copied out of a slot; the least recently used leaf goes first. All of it belongs
to one set of weights: whoever changes those clears it. It knows neither models nor slots nor requests.

Shapes: L layers, H key-value heads, D head dimension, T tokens.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
