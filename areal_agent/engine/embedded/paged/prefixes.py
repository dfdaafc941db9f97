"""Which pages hold which tokens, so that rows begin with what others have computed. Knows no memory and no rows.

A page is found by the page before it and its own ids: a tree of whole pages. Pages that no row has are idle, in the
order in which they were left. A row leaves its last page first, and whoever has a page has all those before it: the
page that has been idle longest is never before another one that is kept.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from areal_agent.engine.embedded.kv_store import Ids
from areal_agent.engine.embedded.paged.pool import NOBODYS_PAGE, PAGE_TOKENS

_Key = tuple[int, bytes]  # the page before it (nobody's for the first) and its ids


class PagePrefixes:
    """Pages by what they hold."""

    def __init__(self) -> None:
        self._pages: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def match(self, ids: Ids) -> list[int]:
        """The pages of the longest beginning of `ids` that is kept whole."""
        pages: list[int] = []
        before = NOBODYS_PAGE
        for part in _whole_pages(ids):
            page = self._pages.get((before, part))
            if page is None:
                break
            pages.append(page)
            before = page
        return pages

    def keep(self, ids: Ids, pages: Sequence[int]) -> list[int]:
        """Keep a row's whole pages from now on. Where the same tokens are kept already, the page that has them: the
        row is to take that one, and its own is kept by nobody."""
        kept: list[int] = []
        before = NOBODYS_PAGE
        for part, page in zip(_whole_pages(ids), pages, strict=False):
            before = self._pages.setdefault((before, part), page)
            kept.append(before)
            if before == page:
                self._keys.setdefault(page, (kept[-2] if len(kept) > 1 else NOBODYS_PAGE, part))
        return kept

    def holds(self, page: int) -> bool:
        return page in self._keys

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def take(self, page: int) -> None:
        """A row has this page."""
        self._idle.pop(page, None)

    def leave(self, page: int) -> None:
        """No row has this page any more, which is kept."""
        self._idle[page] = None

    def pop_oldest(self) -> int:
        """Keep the page no longer that has been idle longest. Raises KeyError when none is."""
        page, _ = self._idle.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page

    def clear(self) -> list[int]:
        """Keep nothing any more; the pages that were idle."""
        idle = list(self._idle)
        for one in (self._pages, self._keys, self._idle):
            one.clear()
        return idle


def _whole_pages(ids: Ids) -> Iterator[bytes]:
    """The ids of each page that they fill."""
    for stop in range(PAGE_TOKENS, len(ids) + 1, PAGE_TOKENS):
        yield ids[stop - PAGE_TOKENS : stop].tobytes()
