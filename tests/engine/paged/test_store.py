"""Which row has which page:

- whatever rows come, grow, are kept, move and go: each page is free, idle or of those rows that have it, and what a row
  begins with holds exactly its tokens
- a row that outgrows the room is told so, and what is idle goes first, the longest idle before others
- the page of nobody is nobody's
"""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal_agent.engine.embedded.kv_cache import KVShape
from areal_agent.engine.embedded.paged.attention import Gathered
from areal_agent.engine.embedded.paged.pool import NOBODYS_PAGE, PAGE_TOKENS
from areal_agent.engine.embedded.paged.store import PageStore

MAX_CONTEXT, NUM_SLOTS = 5 * PAGE_TOKENS, 4


def new_store(num_pages: int) -> PageStore:
    return PageStore(
        KVShape(num_layers=1, num_kv_heads=1, head_dim=1),
        Gathered(),
        num_slots=NUM_SLOTS,
        max_context_tokens=MAX_CONTEXT,
        num_tokens=num_pages * PAGE_TOKENS,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def ids_of(*pages: int, rest: int = 0) -> np.ndarray:
    """Whole pages of one number each, and a few tokens."""
    return np.array([page for page in pages for _ in range(PAGE_TOKENS)] + [99] * rest, dtype=np.int32)


def pages_of(store: PageStore, slot: int, num_tokens: int) -> list[int]:
    lengths = [1] * slot + [num_tokens]
    return store.tables(lengths)[slot].tolist()


class Store(RuleBasedStateMachine):
    """Rows of few different tokens, so that many begin alike, in a store that is short of pages."""

    @initialize(num_pages=st.integers(5, 14))
    def start(self, num_pages: int) -> None:
        self.store = new_store(num_pages)
        self.num_pages = num_pages
        self.rows: list[list[int]] = []
        self.is_mixed: list[bool] = []
        self.content: dict[int, list[int]] = {}  # of each page, as it was last written

    def write(self, slot: int, begin: int) -> None:
        ids = self.rows[slot]
        pages = pages_of(self.store, slot, len(ids))
        for position in range(begin, len(ids)):
            page = self.content.setdefault(pages[position // PAGE_TOKENS], [0] * PAGE_TOKENS)
            page[position % PAGE_TOKENS] = ids[position]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    @precondition(lambda self: len(self.rows) < NUM_SLOTS)
    @rule(
        pages=st.lists(st.integers(1, 2), max_size=4),
        rest=st.lists(st.integers(1, 2), min_size=1, max_size=PAGE_TOKENS),
    )
    def begin(self, pages: list[int], rest: list[int]) -> None:
        ids = np.concatenate([ids_of(*pages), np.array(rest, dtype=np.int32)])
        if self.rows and not self.store.can_begin(ids, self.lengths):
            return
        num_known = self.store.begin(ids, self.lengths)
        assert num_known < len(ids)
        self.rows.append(ids.tolist())
        self.is_mixed.append(False)
        slot = len(self.rows) - 1
        for number, page in enumerate(pages_of(self.store, slot, len(ids))[: num_known // PAGE_TOKENS]):
            assert self.content[page] == ids[number * PAGE_TOKENS :][:PAGE_TOKENS].tolist()
        self.write(slot, num_known)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), ids=st.lists(st.integers(1, 2), min_size=1, max_size=PAGE_TOKENS))
    def grow(self, data: st.DataObject, ids: list[int]) -> None:
        slot = data.draw(st.integers(0, len(self.rows) - 1))
        longer = (self.rows[slot] + ids)[:MAX_CONTEXT]
        lengths = self.lengths
        lengths[slot] = len(longer)
        if self.store.fit(lengths):
            begin = len(self.rows[slot])
            self.rows[slot] = longer
            self.write(slot, begin)
        else:
            assert len(self.rows) > 1, "one row alone always fits"

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.rows) - 1))
        if not self.is_mixed[slot]:
            self.store.keep(slot, np.array(self.rows[slot], dtype=np.int32), self.lengths)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot, last = data.draw(st.integers(0, len(self.rows) - 1)), len(self.rows) - 1
        if slot != last:
            self.store.move(last, slot, len(self.rows[last]))
        self.store.drop(last)
        for kept in (self.rows, self.is_mixed):
            kept[slot] = kept[last]
            kept.pop()

    @rule()
    def forget(self) -> None:
        self.store.forget()
        self.is_mixed = [True] * len(self.rows)

    @invariant()
    def every_row_reads_what_it_wrote(self) -> None:
        for slot, ids in enumerate(getattr(self, "rows", [])):
            pages = pages_of(self.store, slot, len(ids))[: -(-len(ids) // PAGE_TOKENS)]
            assert NOBODYS_PAGE not in pages and len(set(pages)) == len(pages)
            assert [one for page in pages for one in self.content[page]][: len(ids)] == ids

    @invariant()
    def no_page_is_lost(self) -> None:
        if hasattr(self, "rows"):
            used = {page for slot in range(len(self.rows)) for page in self.table(slot)}
            assert self.store.num_used(self.lengths) == len(used) * PAGE_TOKENS
            assert self.store.num_used(self.lengths) + self.store.num_kept <= self.num_pages * PAGE_TOKENS

    def table(self, slot: int) -> list[int]:
        """All pages that a row has, those that it is still to fill among them."""
        return [page for page in pages_of(self.store, slot, MAX_CONTEXT) if page != NOBODYS_PAGE]


Store.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStore = Store.TestCase


def test_what_has_been_idle_longest_goes_first():
    store = new_store(5)
    for page in (1, 2):
        ids = ids_of(page, page + 10)
        store.begin(ids, [])
        store.keep(0, ids, [len(ids)])
        store.drop(0)
    store.begin(ids_of(3, 4), [])  # one page is free
    assert store.num_known(ids_of(1, 11)) == PAGE_TOKENS, "its end was idle longest"
    assert store.num_known(ids_of(2, 12)) == 2 * PAGE_TOKENS
    store.begin(ids_of(5), [32])
    assert store.num_known(ids_of(1, 11)) == 0
    assert store.num_known(ids_of(2, 12)) == 2 * PAGE_TOKENS


def test_a_row_that_outgrows_the_room_is_told_so():
    store = new_store(5)
    store.begin(ids_of(1, 2), [])
    store.begin(ids_of(3), [32])
    assert store.fit([3 * PAGE_TOKENS, 2 * PAGE_TOKENS])
    assert not store.fit([3 * PAGE_TOKENS + 1, 2 * PAGE_TOKENS])


def test_a_row_begins_only_where_those_that_run_may_grow():
    store = new_store(7)
    store.begin(ids_of(1, rest=1), [])
    assert store.can_begin(ids_of(2), [PAGE_TOKENS + 1])
    assert not store.can_begin(ids_of(2, rest=1), [PAGE_TOKENS + 1])


def test_a_row_needs_no_room_for_what_is_shared():
    store = new_store(7)
    ids = ids_of(1, rest=1)
    store.begin(ids, [])
    store.keep(0, ids, [len(ids)])
    assert store.can_begin(ids, [len(ids)])
    assert not store.can_begin(ids_of(2, rest=1), [len(ids)])
