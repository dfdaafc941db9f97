"""Requests that a server is preparing, and has not handed to its scheduler yet: an abort reaches them, too.

It knows neither what there is to prepare nor how a request ends.
"""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True, eq=False)
class Preparation:
    """Of one request."""

    request_id: str
    is_aborted: bool = False


class Preparations:
    """All that are under way. Use it from one event loop."""

    def __init__(self) -> None:
        self._under_way: set[Preparation] = set()

    @contextlib.contextmanager
    def begin(self, request_id: str) -> Generator[Preparation]:
        """Inside, an abort of this request is remembered."""
        one = Preparation(request_id=request_id)
        self._under_way.add(one)
        try:
            yield one
        finally:
            self._under_way.remove(one)

    def abort(self, request_id: str | None) -> None:
        """One request, or all of them. An unknown id is no error."""
        for one in self._under_way:
            one.is_aborted |= request_id in (None, one.request_id)
