"""What bounds a gateway: sizes, numbers and times. It knows nothing of who keeps them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds of one gateway.

    >>> Limits(max_sessions=2).session_timeout_s is None
    True
    """

    max_body_bytes: int = 32 * 2**20
    max_sessions: int = 8192  # open at once
    max_calls_per_session: int = 128  # in flight
    session_timeout_s: float | None = None  # a session without a call for so long ends as `timeout`; None: never
    idle_timeout_s: float = 75.0  # a connection that sends no whole request head for so long is closed
    body_timeout_s: float = 60.0  # from the head of a request to the end of its body
    stall_timeout_s: float = 60.0  # a client that takes nothing of its answer for so long is hung up on
