"""Attention over pages. Knows neither rows nor which page is whose, but for the tables that it is given.

Two ways. `Gathered` copies the pages of some rows side by side and calls PyTorch's attention: it runs everywhere, and
reads keys and values three times. `Flash` reads pages where they lie, by FlashAttention 3 (Shah et al. 2024, arXiv
2407.08608) behind PyTorch's `varlen_attn`: Hopper GPUs, where its package is installed. `best_attention` takes the
second one where it has proved to answer as the first one does.

Shapes: n rows, N packed tokens, T tokens of one piece, Q query heads, H key-value heads, D head dimension, P positions
of a page, B pages of the pool, W pages of the longest row.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_agent.engine.embedded.decoder import Step
from areal_agent.engine.embedded.kv_store import StoredStep
from areal_agent.engine.embedded.paged.pool import PAGE_TOKENS, PagePool


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedPieces:
    """Tokens `[begins[i], begins[i] + num_tokens[i])` of the row whose pages are `tables[i]`, packed in this order."""

    tables: NDArray[np.int32]  # [n, W]
    begins: Sequence[int]
    num_tokens: Sequence[int]

    @property
    def ends(self) -> list[int]:
        return [begin + length for begin, length in zip(self.begins, self.num_tokens, strict=True)]

    @property
    def starts(self) -> list[int]:
        """Where each piece begins on the packed axis, and where the last one ends, `[n + 1]`."""
        return [0, *np.cumsum(self.num_tokens).tolist()]

    def places(self) -> NDArray[np.int64]:
        """Where the keys and values of each token go, `[N]`."""
        parts = [
            table.astype(np.int64)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
            for table, positions in zip(self.tables, map(np.arange, self.begins, self.ends), strict=True)
        ]
        return np.concatenate(parts)


class PagedAttention(Protocol):
    """How steps over pages attend."""

    def prefill(self, pool: PagePool, pieces: PagedPieces) -> Step: ...

    def decode(self, pool: PagePool, tables: Tensor, lengths: Tensor) -> StoredStep:
        """One new token of each row; tables `[n, W]` and lengths `[n]`, which count it: int32, on the pool's device."""
        ...


def _last_places(tables: Tensor, positions: Tensor) -> Tensor:
    """Where the keys and values of one token a row go, `[n]`."""
    pages = tables.gather(1, (positions // PAGE_TOKENS)[:, None])[:, 0].long()
    return pages * PAGE_TOKENS + positions % PAGE_TOKENS


GATHERED_BYTES = 2**30
"""Of keys and values that lie side by side at once, or of a mask: 256 rows as wide as one of 32,768 tokens would be
34 GB."""


class Gathered:
    """Pages copied side by side, and PyTorch's attention over them."""

    def __init__(self, *, most_bytes: int = GATHERED_BYTES) -> None:
        self._most_bytes = most_bytes

    def prefill(self, pool: PagePool, pieces: PagedPieces) -> Step:
        return _GatheredPrefill(
            pool=pool,
            places=torch.from_numpy(pieces.places()).to(pool.device),
            tables=torch.from_numpy(pieces.tables).to(pool.device),
            pieces=pieces,
            most_bytes=self._most_bytes,
        )

    def decode(self, pool: PagePool, tables: Tensor, lengths: Tensor) -> StoredStep:
        positions = lengths.long() - 1
        is_beyond = torch.arange(tables.shape[1] * PAGE_TOKENS, device=tables.device) >= lengths[:, None]
        mask = torch.zeros(is_beyond.shape, device=tables.device, dtype=pool.dtype)
        return _GatheredDecode(
            pool=pool,
            rows_at_once=max(1, self._most_bytes // (tables.shape[1] * pool.page_bytes)),
            positions=positions,
            places=_last_places(tables, positions),
            tables=tables,
            mask=mask.masked_fill_(is_beyond, float("-inf"))[:, None, None],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _GatheredDecode:
    pool: PagePool
    rows_at_once: int
    positions: Tensor  # [n]
    places: Tensor  # [n]
    tables: Tensor  # [n, W]
    mask: Tensor  # [n, 1, 1, W * P]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.write(layer, self.places, keys, values)
        num_rows, num_kv_heads, head_dim = keys.shape
        grouped = queries.reshape(num_rows, num_kv_heads, -1, head_dim)  # [n, H, G, D]
        parts = [one.split(self.rows_at_once) for one in (grouped, self.tables, self.mask)]
        outputs = [self._attend_rows(layer, *part) for part in zip(*parts, strict=True)]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output.reshape(num_rows, -1)

    def _attend_rows(self, layer: int, grouped: Tensor, tables: Tensor, mask: Tensor) -> Tensor:
        keys, values = (_side_by_side(part[tables]) for part in self.pool.layer(layer))
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class _GatheredPrefill:
    pool: PagePool
    places: Tensor  # [N]
    tables: Tensor  # [n, W]
    pieces: PagedPieces
    most_bytes: int  # of a mask

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.write(layer, self.places, keys, values)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        starts = self.pieces.starts
        for row, (start, stop) in enumerate(pairwise(starts)):
            own = [one[start:stop].transpose(0, 1)[None] for one in (queries, keys, values)]  # [1, heads, T, D]
            output[start:stop] = self._attend_piece(layer, row, *own)[0].transpose(0, 1)
        return output.flatten(1)

    def _attend_piece(self, layer: int, row: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        begin, end = self.pieces.begins[row], self.pieces.ends[row]
        if not begin:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        pages = self.tables[row : row + 1, : -(-end // PAGE_TOKENS)]
        all_keys, all_values = (_side_by_side(part[pages]) for part in self.pool.layer(layer))
        group, width = queries.shape[1] // all_keys.shape[1], all_keys.shape[2]
        at_once = max(1, self.most_bytes // (group * width * queries.itemsize))
        parts = [
            _attend_from(begin + first, part, all_keys, all_values)
            for first, part in zip(range(0, end - begin, at_once), queries.split(at_once, dim=2), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_from(begin: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Queries `[1, Q, T, D]` of tokens from position `begin` on, which see what is not after them."""
    num_kv_heads, width = keys.shape[1:3]
    mask = torch.full((queries.shape[2], width), float("-inf"), device=queries.device, dtype=queries.dtype)
    mask.triu_(begin + 1)
    # The group on the query axis: PyTorch's quick kernels take groups, or a mask, and not both.
    grouped = queries.reshape(1, num_kv_heads, -1, queries.shape[3])  # [1, H, G * T, D]
    masks = mask.repeat(grouped.shape[2] // len(mask), 1)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=masks).reshape(queries.shape)


def _side_by_side(pages: Tensor) -> Tensor:
    """`[n, W, P, H, D]` as `[n, H, W * P, D]`."""
    return pages.flatten(1, 2).transpose(1, 2)


class Kernel(Protocol):
    """What `torch.nn.attention.varlen.varlen_attn` does with pages."""

    def __call__(
        self,
        query: Tensor,  # [N, Q, D]
        key: Tensor,  # [B, P, H, D], as the values
        value: Tensor,
        cu_seq_q: Tensor,  # where each piece begins on the packed axis, [n + 1]
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],  # (-1, 0): causal, each piece at the end of its row
        enable_gqa: bool,
        seqused_k: Tensor,  # [n]
        block_table: Tensor,  # [n, W]
    ) -> Tensor: ...


class Flash:
    """Pages read where they lie."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @classmethod
    def of_torch(cls) -> Self:
        """FlashAttention 3 through PyTorch. Raises ImportError, or RuntimeError, where it is not to be had."""
        varlen = importlib.import_module("torch.nn.attention.varlen")  # from torch 2.10 on, with pages from 2.11 on
        importlib.import_module("torch.nn.attention").activate_flash_attention_impl("FA3")
        return cls(varlen.varlen_attn)

    @staticmethod
    def undo() -> None:
        """PyTorch's own attention has used the same kernels since `of_torch`: from now on it does not."""
        restore = getattr(importlib.import_module("torch.nn.attention"), "restore_flash_attention_impl", None)
        if restore is not None:
            restore(False)  # and says nothing where there is nothing to restore

    def prefill(self, pool: PagePool, pieces: PagedPieces) -> Step:
        return _FlashStep(
            kernel=self._kernel,
            pool=pool,
            positions=torch.empty(0, dtype=torch.long, device=pool.device),
            places=torch.from_numpy(pieces.places()).to(pool.device),
            tables=torch.from_numpy(pieces.tables).to(pool.device),
            lengths=torch.tensor(pieces.ends, dtype=torch.int32, device=pool.device),
            starts=torch.tensor(pieces.starts, dtype=torch.int32, device=pool.device),
            longest=max(pieces.num_tokens),
        )

    def decode(self, pool: PagePool, tables: Tensor, lengths: Tensor) -> StoredStep:
        positions = lengths.long() - 1
        return _FlashStep(
            kernel=self._kernel,
            pool=pool,
            positions=positions,
            places=_last_places(tables, positions),
            tables=tables,
            lengths=lengths,
            starts=torch.arange(len(lengths) + 1, dtype=torch.int32, device=tables.device),
            longest=1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _FlashStep:
    kernel: Kernel
    pool: PagePool
    positions: Tensor  # [n] of a decode, else empty
    places: Tensor  # [N]
    tables: Tensor  # [n, W]
    lengths: Tensor  # [n], up to the new tokens
    starts: Tensor  # [n + 1]
    longest: int  # T of the longest piece

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.pool.write(layer, self.places, keys, values)
        output = self.kernel(
            queries.contiguous(),
            *self.pool.layer(layer),
            self.starts,
            None,
            self.longest,
            self.tables.shape[1] * PAGE_TOKENS,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
        )
        return output.flatten(1)
