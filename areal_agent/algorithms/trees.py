"""Sequences that share prefixes, each prefix once: the row that they make, and who sees whom in it.

    a b c d        a b c d f e x y      a row: the trie of the sequences, depth first
    a b c f   ─▶   0 1 2 3 3 2 0 1      depths: what the model takes for positions
    a b e          6 6 5 4 5 6 8 8      ends: where the subtree of each position ends in the row
    x y

In a causal model equal tokens after equal tokens have equal hidden states, whoever wrote them, so tokens alone decide.
A query at place q sees the key at place k if k <= q < ends[k]: its ancestors and itself. The row's first sequence is a
longest one, so that its places are its depths: a rule about distances in one sequence can be asked about depths.

A row is attended to in blocks of queries in a row. The keys of a block are its own and its first query's ancestors: an
earlier place that any of its queries sees is an ancestor of them all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUERIES_PER_BLOCK = 512
"""The most queries of a block, of which one at a time has scores [H, this, keys that any sees]."""
JOINED_QUERIES = 128
"""Short chains are joined to blocks of so many: a call costs more than scores of tokens that do not see each other."""
MIN_SHARED = 0.1
"""The fraction of the tokens from which on it is faster to share them (docs/benchmarks.md, shared prefixes)."""


def in_order(sequences: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the order of a trie's leaves, and how many tokens each has in common with the one before it.

    The number of distinct positions is the sum of the lengths less that of the overlaps. Shapes: [T] int64 each.

    >>> in_order([torch.tensor([1, 2, 3]), torch.tensor([7]), torch.tensor([1, 2, 2, 5])])
    ([2, 0, 1], [0, 2, 0])
    """
    keys = [one.numpy().astype(">u4").tobytes() for one in sequences]  # in the order of their tokens
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    overlaps = [overlap(sequences[one], sequences[after]) for one, after in pairwise(order)]
    return order, [0, *overlaps][: len(order)]


def pays(sequences: Sequence[Tensor]) -> bool:
    """Return whether sequences share so much that they are computed faster in a tree than one by one."""
    return sum(in_order(sequences)[1]) >= MIN_SHARED * sum(len(one) for one in sequences)


def overlap(one: Tensor, other: Tensor) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(one), len(other))
    differs = one.numpy()[:length] != other.numpy()[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Queries that attend in one call: the places `start` to `end` of a row."""

    start: int
    end: int
    keys: Tensor  # [K] int64, places: ancestors of the first query, from the top down, then the block's own
    num_above: int  # how many of these ancestors, from the top down, are above all queries under the same root
    is_chain: bool  # each query is the child of the one before, so that it sees all keys up to itself


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tree:
    """A row of N positions."""

    inputs: Tensor  # [N] int64
    depths: Tensor  # [N] int64
    ends: Tensor  # [N] int64
    places: tuple[Tensor, ...]  # the places of each sequence's tokens, [T] int64
    blocks: tuple[Block, ...]
    longest: int  # of the lengths of the sequences

    @classmethod
    def of(cls, sequences: Sequence[Tensor]) -> Self:
        """Return the row of sequences, [T] int64 each, in any order."""
        longest = max(sequences, key=len)
        order, _ = in_order(sequences)
        order.sort(key=lambda index: -overlap(longest, sequences[index]))  # stable: depth first, from the longest on
        row = torch.cat(list(sequences))  # at most so long
        depths, ends = torch.zeros_like(row), torch.zeros_like(row)
        places: dict[int, Tensor] = {}
        path, size = row[:0], 0
        for number, index in enumerate(order):
            tokens = sequences[index]
            shared = overlap(sequences[order[number - 1]], tokens) if number else 0
            end = size + len(tokens) - shared
            path = places[index] = torch.cat([path[:shared], torch.arange(size, end)])
            row[size:end], depths[size:end] = tokens[shared:], torch.arange(shared, len(tokens))
            ends[path] = size = end  # the last sequence that passes a place tells
        return cls(
            inputs=row[:size],
            depths=depths[:size],
            ends=ends[:size],
            places=tuple(places[index] for index in range(len(sequences))),
            blocks=tuple(_blocks(depths[:size].numpy(), ends[:size].numpy())),
            longest=len(longest),
        )

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> Self:
        """Return a row of sequences that share nothing, without tokens, in this order. Its depths are its places."""
        sizes = torch.tensor(lengths)
        ends = sizes.cumsum(0).repeat_interleave(sizes)
        row = torch.arange(len(ends))
        depths = row - (ends - sizes.repeat_interleave(sizes))
        blocks = tuple(_blocks(depths.numpy(), ends.numpy()))
        places = row.split(list(lengths))
        return cls(inputs=row[:0], depths=row, ends=ends, places=places, blocks=blocks, longest=max(lengths))

    def to(self, device: torch.device) -> Self:
        """Return this row on `device`; `places` stay."""
        if device.type == "cpu":
            return self
        keys = torch.cat([one.keys for one in self.blocks]).to(device)  # one transfer for all blocks
        parts = keys.split([len(one.keys) for one in self.blocks])
        blocks = tuple(replace(one, keys=part) for one, part in zip(self.blocks, parts, strict=True))
        moved = {name: getattr(self, name).to(device) for name in ("inputs", "depths", "ends")}
        return replace(self, **moved, blocks=blocks)

    def seen(self, block: Block, keys: Tensor) -> Tensor:
        """Return which of the places `keys` each query of a block sees, [Q, K]. Shape: [K] int64."""
        queries = torch.arange(block.start, block.end, device=keys.device)[:, None]
        return (keys <= queries) & (queries < self.ends[keys])


def _blocks(depths: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[Block]:
    """Cut a row into blocks: pieces of chains, of which short neighbours are joined."""
    chains = [0, *(np.flatnonzero(np.diff(depths) != 1) + 1).tolist(), len(depths)]
    start = end = 0  # of the block that more may join
    for first, after in pairwise(chains):
        for piece_end in (*range(first + QUERIES_PER_BLOCK, after, QUERIES_PER_BLOCK), after):
            if piece_end - start > JOINED_QUERIES and end > start:
                yield _block(start, end, depths, ends)
                start = end
            end = piece_end
    yield _block(start, end, depths, ends)


def _block(start: int, end: int, depths: NDArray[np.int64], ends: NDArray[np.int64]) -> Block:
    keys = np.concatenate([np.flatnonzero(ends[:start] > start), np.arange(start, end)])
    is_chain = bool(depths[end - 1] - depths[start] == end - 1 - start)  # a step goes down by one at the most
    num_above = int(depths[start : min(end, ends[keys[0]])].min())
    return Block(start=start, end=end, keys=torch.from_numpy(keys), num_above=num_above, is_chain=is_chain)
