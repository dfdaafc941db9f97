"""All sessions of a gateway, by id and by the hash of their key. Ended ones are kept for a while, then forgotten."""

from collections import deque

from areal_agent.errors import RequestError
from areal_agent.gateway.session import Session, SessionState

NUM_ENDED_KEPT = 256
"""Ended sessions that are kept, for late callers and exports: memory must not grow with the length of a run."""


class Sessions:
    """Finds sessions. It does not end them."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_key_hash: dict[str, Session] = {}
        self._ended: deque[Session] = deque()

    @property
    def num_open(self) -> int:
        return len(self._by_id) - len(self._ended)

    def require_free(self, session_id: str) -> None:
        """Raises RequestError when there is a session of this id."""
        if session_id in self._by_id:
            raise RequestError(
                f"there is a session {session_id!r} already; choose another session_id, or none",
                status=409,
                param="session_id",
                code="session_exists",
            )

    def add(self, session: Session) -> None:
        self._by_id[session.record.id] = session
        self._by_key_hash[session.record.key_hash] = session

    def remove(self, session: Session) -> None:
        del self._by_id[session.record.id]
        del self._by_key_hash[session.record.key_hash]

    def with_key(self, key_hash: str) -> Session | None:
        """A dictionary of hashes tells nothing by its timing: nobody can choose the hash of a key that he guesses."""
        return self._by_key_hash.get(key_hash)

    def with_id(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def is_open(self, session_id: str) -> bool:
        """Whether it is here and has not ended."""
        session = self._by_id.get(session_id)
        return session is not None and session.state is not SessionState.ENDED

    def ended(self, session_id: str) -> Session:
        """A session that has ended; raises RequestError when there is none, or when it goes on."""
        session = self._by_id.get(session_id)
        if session is None:
            raise RequestError(
                f"no session {session_id!r} here; it never was, or ended so long ago that only the ledger has it",
                status=404,
                param="session_id",
                code="session_not_found",
            )
        if session.state is not SessionState.ENDED:
            raise RequestError(
                f"session {session_id!r} is {session.state}; end it first",
                status=409,
                param="session_id",
                code="session_open",
            )
        return session

    def retire(self, session: Session) -> None:
        """Note that a session has ended, and forget the one that ended longest ago."""
        self._ended.append(session)
        if len(self._ended) > NUM_ENDED_KEPT:
            self.remove(self._ended.popleft())
