"""Which requests a session has seen, by what they say: tells repetitions apart, and other tools or system messages.

Knows nothing of answers and tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from areal_agent.tokens.prompt import Key
from areal_agent.types import ForkReason


@dataclass(kw_only=True, slots=True)
class _Request:
    key: Key
    opening: str
    num_planned: int = 0
    is_recorded: bool = False


@dataclass(kw_only=True, slots=True)
class Requests:
    """All requests of a session."""

    num_recorded: int = 0
    _by_body: dict[bytes, list[_Request]] = field(default_factory=dict[bytes, list[_Request]])

    def add(self, key: Key, opening: str = "") -> int:
        """Count a request; returns how many there were before with the same messages, tools and opening."""
        same = self._by_body.setdefault(key.body, [])
        request = next((one for one in same if one.key == key and one.opening == opening), None)
        if request is None:
            request = _Request(key=key, opening=opening)
            same.append(request)
        request.num_planned += 1
        return request.num_planned - 1

    def record(self, key: Key) -> None:
        """A request that was added has been answered."""
        self.num_recorded += 1
        for request in self._of(key):
            request.is_recorded = True

    def is_recorded(self, key: Key) -> bool:
        """Whether the same messages and tools were answered before, whatever the answer was to begin with."""
        return any(request.is_recorded for request in self._of(key))

    def has_recorded(self, key: Key, bodies: Iterable[bytes]) -> bool:
        """Whether a request of one of these bodies, with the head and the tools of `key`, was answered before."""
        return any(self.is_recorded(replace(key, body=body)) for body in bodies)

    def change_of(self, key: Key) -> ForkReason | None:
        """How a request differs from an answered one that has the same messages behind the head."""
        requests = self._by_body.get(key.body, ()) if key.body else ()
        return change_between(key, (request.key for request in requests if request.is_recorded))

    def _of(self, key: Key) -> Iterable[_Request]:
        return (request for request in self._by_body.get(key.body, ()) if request.key == key)


def change_between(key: Key, others: Iterable[Key]) -> ForkReason | None:
    """What alone differs in `key` from one of `others`, whose bodies are equal: its tools, or its system messages."""
    reason = None
    for other in others:
        if other.head == key.head and other.tools != key.tools:
            return ForkReason.TOOLS_CHANGED
        if other.tools == key.tools and other.head != key.head:
            reason = ForkReason.SYSTEM_CHANGED
    return reason
