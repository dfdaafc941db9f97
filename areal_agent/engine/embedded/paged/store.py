"""Keys and values in pages: which row has which, which are kept for others, which are free."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_agent.engine.embedded.decoder import Step
from areal_agent.engine.embedded.kv_cache import KVShape
from areal_agent.engine.embedded.kv_store import HEADROOM_TOKENS, Ids, Piece, StoredStep
from areal_agent.engine.embedded.paged.attention import PagedAttention, PagedPieces
from areal_agent.engine.embedded.paged.pool import NOBODYS_PAGE, PAGE_TOKENS, PagePool
from areal_agent.engine.embedded.paged.prefixes import PagePrefixes

_HEADROOM_PAGES = HEADROOM_TOKENS // PAGE_TOKENS


class PageStore:
    """A KVStore for GPUs; it works on a CPU as well. All pages of a pool but nobody's are its."""

    def __init__(
        self,
        shape: KVShape,
        attention: PagedAttention,
        *,
        num_slots: int,
        max_context_tokens: int,
        num_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Room for `num_tokens`, and for one context at least."""
        self.max_pages = num_pages(max_context_tokens)  # of one row
        self.max_rows = num_slots
        self.device = device
        self._attention = attention
        self._free = list(range(max(num_tokens // PAGE_TOKENS, self.max_pages), NOBODYS_PAGE, -1))
        self._pool = PagePool(shape, num_pages=len(self._free) + 1, device=device, dtype=dtype)
        self._tables: NDArray[np.int32] = np.zeros((num_slots, self.max_pages), dtype=np.int32)
        self._num_pages = [0] * num_slots  # of each table
        self._num_rows = [0] * (len(self._free) + 1)  # that have each page
        self._prefixes = PagePrefixes()
        self.num_tokens = len(self._free) * PAGE_TOKENS

    @property
    def num_kept(self) -> int:
        return self._prefixes.num_idle * PAGE_TOKENS

    @property
    def always_keeps(self) -> bool:
        return True

    def num_used(self, lengths: Sequence[int]) -> int:
        return self.num_tokens - (len(self._free) + self._prefixes.num_idle) * PAGE_TOKENS

    def num_known(self, ids: Ids) -> int:
        return len(self._prefixes.match(ids)) * PAGE_TOKENS

    def can_begin(self, ids: Ids, lengths: Sequence[int]) -> bool:
        room = len(self._free) + self._prefixes.num_idle - _HEADROOM_PAGES * (len(lengths) + 1)
        if num_pages(len(ids)) <= room:
            return True
        known = self._prefixes.match(ids[:-1])
        return num_pages(len(ids)) - len(known) <= room - sum(map(self._prefixes.is_idle, known))

    def begin(self, ids: Ids, lengths: Sequence[int]) -> int:
        slot = len(lengths)
        known = self._prefixes.match(ids[:-1])
        for page in known:
            self._prefixes.take(page)
            self._add(slot, page)
        if not self._grow(slot, len(ids)):
            raise AssertionError(f"no room for {len(ids)} tokens, which `can_begin` has promised")
        return len(known) * PAGE_TOKENS

    def fit(self, lengths: Sequence[int]) -> bool:
        return all(self._grow(slot, length) for slot, length in enumerate(lengths))

    def keep(self, slot: int, ids: Ids, lengths: Sequence[int]) -> None:
        pages = self._pages(slot)
        for number, (page, kept) in enumerate(zip(pages, self._prefixes.keep(ids, pages), strict=False)):
            if page != kept:
                self._prefixes.take(kept)
                self._num_rows[kept] += 1
                self._tables[slot, number] = kept
                self._leave(page)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        self._tables[[source, target]] = self._tables[[target, source]]
        sizes = self._num_pages
        sizes[source], sizes[target] = sizes[target], sizes[source]

    def drop(self, slot: int) -> None:
        for page in reversed(self._pages(slot)):
            self._leave(page)
        self._tables[slot, : self._num_pages[slot]] = NOBODYS_PAGE  # what is read and masked is not another row's
        self._num_pages[slot] = 0

    def forget(self) -> None:
        self._free.extend(self._prefixes.clear())

    def wipe(self) -> None:
        self._pool.wipe()

    def free(self) -> None:
        self._pool.free()

    def allocate(self) -> None:
        self._pool.allocate()

    def prefill(self, pieces: Sequence[Piece]) -> Step:
        return self._attention.prefill(
            self._pool,
            PagedPieces(
                tables=self._tables[[piece.slot for piece in pieces]],
                begins=[piece.begin for piece in pieces],
                num_tokens=[len(piece.ids) for piece in pieces],
            ),
        )

    def decode(self, lengths: Sequence[int]) -> StoredStep:
        tables = torch.from_numpy(self.tables(lengths)).to(self.device)
        return self.step(tables, torch.tensor(lengths, dtype=torch.int32, device=self.device))

    def step(self, tables: Tensor, lengths: Tensor) -> StoredStep:
        """The same over tables `[n, W]` and lengths `[n]` that are on the device: int32."""
        return self._attention.decode(self._pool, tables, lengths)

    def tables(self, lengths: Sequence[int]) -> NDArray[np.int32]:
        """The pages of the first n rows, as far as the longest of them goes, `[n, W]`."""
        return self._tables[: len(lengths), : num_pages(max(lengths))]

    def _pages(self, slot: int) -> list[int]:
        return self._tables[slot, : self._num_pages[slot]].tolist()

    def _grow(self, slot: int, num_tokens: int) -> bool:
        """Give a row the pages that it lacks. False: there are not as many."""
        while self._num_pages[slot] * PAGE_TOKENS < num_tokens:
            if self._free:
                self._add(slot, self._free.pop())
            elif self._prefixes.num_idle:
                self._add(slot, self._prefixes.pop_oldest())
            else:
                return False
        return True

    def _add(self, slot: int, page: int) -> None:
        self._tables[slot, self._num_pages[slot]] = page
        self._num_pages[slot] += 1
        self._num_rows[page] += 1

    def _leave(self, page: int) -> None:
        """One row less has this page."""
        self._num_rows[page] -= 1
        if self._num_rows[page]:
            return
        if self._prefixes.holds(page):
            self._prefixes.leave(page)
        else:
            self._free.append(page)


def num_pages(num_tokens: int) -> int:
    """That hold so many tokens.

    >>> num_pages(0), num_pages(1), num_pages(16), num_pages(17)
    (0, 1, 1, 2)
    """
    return -(-num_tokens // PAGE_TOKENS)
