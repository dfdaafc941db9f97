"""Which requests a session has seen, by what they say: tells repetitions apart, and other tools or system messages.

Knows nothing of answers and tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from areal_agent.tokens.prompt import Key
from areal_agent.types import ForkReason


@dataclass(kw_only=True, slots=True)
class _Request:
    key: Key
    num_planned: int = 0
    is_recorded: bool = False


@dataclass(kw_only=True, slots=True)
class Requests:
    """All requests of a session."""

    num_recorded: int = 0
    _by_body: dict[bytes, list[_Request]] = field(default_factory=dict[bytes, list[_Request]])

    def add(self, key: Key) -> int:
        """Count a request; returns how many there were before with the same messages and tools."""
        request = self._find(key)
        if request is None:
            request = _Request(key=key)
            self._by_body.setdefault(key.body, []).append(request)
        request.num_planned += 1
        return request.num_planned - 1

    def record(self, key: Key) -> None:
        """A request that was added has been answered."""
        self.num_recorded += 1
        request = self._find(key)
        if request is not None:
            request.is_recorded = True

    def is_recorded(self, key: Key) -> bool:
        """Whether the same messages and tools were answered before."""
        request = self._find(key)
        return request is not None and request.is_recorded

    def change_of(self, key: Key) -> ForkReason | None:
        """How a request differs from an answered one that has the same messages behind the head."""
        requests = self._by_body.get(key.body, ()) if key.body else ()
        return change_between(key, (request.key for request in requests if request.is_recorded))

    def _find(self, key: Key) -> _Request | None:
        return next((request for request in self._by_body.get(key.body, ()) if request.key == key), None)


def change_between(key: Key, others: Iterable[Key]) -> ForkReason | None:
    """What alone differs in `key` from one of `others`, whose bodies are equal: its tools, or its system messages."""
    reason = None
    for other in others:
        if other.head == key.head and other.tools != key.tools:
            return ForkReason.TOOLS_CHANGED
        if other.tools == key.tools and other.head != key.head:
            reason = ForkReason.SYSTEM_CHANGED
    return reason
