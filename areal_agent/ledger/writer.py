"""The writer thread with its queue: all that is queued goes into one transaction; callers hear after the commit.

    callers (event loop) ── work, future ──▶ group ──▶ writer thread: BEGIN, work*, COMMIT ──▶ futures resolve

One commit serves everybody who waited for it (group commit): who comes while one is under way, in the same turn of the
event loop, or too soon behind the last group, is in the next one. So a quiet ledger answers at once, and a busy one
spends no more on commits. Work that fails is undone alone; its neighbours stay. It knows nothing of the tables.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_agent.errors import LedgerError

Result = TypeVar("Result")

GROUP_S = 0.002
"""The least time between two groups: each costs a commit, two threads' turns and a wake-up."""


@dataclass(kw_only=True, slots=True)
class _Request:
    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]


@dataclass(kw_only=True, slots=True)
class _Outcome:
    """What a request came to: `error` when it failed, else `result`."""

    request: _Request
    result: Any = None
    error: Exception | None = None


_Perform = Callable[[sqlite3.Connection, _Request], _Outcome]


class GroupCommitWriter:
    """Owns the thread and its connection. Belongs to the event loop that made it; end it with `stop`, then `close`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Sequence[_Request] | None] = queue.SimpleQueue()
        self._waiting: list[_Request] = []
        self._is_busy = False  # a group is on its way, or about to leave
        self._sent_s = -GROUP_S  # when the last group left, by the loop's clock
        self._is_closed = False
        # A daemon: what it has not committed was promised to nobody, so it must not keep a dying process alive.
        self._thread = threading.Thread(target=self._serve, name="ledger-writer", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Do `work` in the next transaction; what it returns, or raises, arrives when that is decided and durable.

        It may be done twice, the first time undone: it is a function of the connection and of nothing that it changes.

        A caller that is cancelled while it waits does not know: the work may be done or not.
        """
        if self._is_closed:
            raise LedgerError("the ledger is closed: nothing can be written any more; open it again")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._waiting.append(_Request(work=work, future=future))
        if not self._is_busy:
            self._is_busy = True
            self._send_soon()
        return await future

    def stop(self) -> None:
        """Take no more work. Called in the event loop, so that nothing slips in behind the end of the queue."""
        if not self._is_closed:
            self._is_closed = True
            self._send()
            self._queue.put(None)

    def close(self) -> None:
        """After `stop`: block until what is queued is committed and the file is closed. Harmless when repeated."""
        self._thread.join()
        self._connection.close()

    def _send_soon(self) -> None:
        self._loop.call_at(self._sent_s + GROUP_S, self._send)

    def _send(self) -> None:
        """In the event loop: let the writer have all who wait."""
        group, self._waiting = self._waiting, []
        self._is_busy = bool(group)
        if group:
            self._sent_s = self._loop.time()
            self._queue.put(group)

    def _serve(self) -> None:
        while (group := self._queue.get()) is not None:
            self._loop.call_soon_threadsafe(self._deliver, self._commit(group))

    def _deliver(self, outcomes: Sequence[_Outcome]) -> None:
        """In the event loop: answer those who still wait, and send those who came meanwhile."""
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._send_soon()
        for outcome in outcomes:
            future = outcome.request.future
            if future.done():  # its caller was cancelled
                continue
            if outcome.error is None:
                future.set_result(outcome.result)
            else:
                future.set_exception(outcome.error)

    def _commit(self, group: Sequence[_Request]) -> Sequence[_Outcome]:
        """Perform a group in one transaction. When that fails (a full disk, say), nothing of it has happened."""
        try:
            return self._transact(group, _perform_trustingly)
        except Exception:  # one of them fails, nobody knows which: again, each on its own
            try:
                return self._transact(group, _perform)
            except Exception as error:
                failure = LedgerError(
                    f"the ledger could not be written: {error}; make room on its disk and resume the run"
                )
                return [_Outcome(request=request, error=failure) for request in group]

    def _transact(self, group: Sequence[_Request], perform: _Perform) -> Sequence[_Outcome]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [perform(self._connection, request) for request in group]
            self._connection.execute("COMMIT")
            return outcomes
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def _perform_trustingly(connection: sqlite3.Connection, request: _Request) -> _Outcome:
    """Do one request's work; it raises what that raises. Spares a savepoint, which costs as much as a small write."""
    return _Outcome(request=request, result=request.work(connection))


def _perform(connection: sqlite3.Connection, request: _Request) -> _Outcome:
    """Do one request's work. If it fails it is undone; the boundary at which an exception becomes its answer."""
    connection.execute("SAVEPOINT request")
    try:
        outcome = _Outcome(request=request, result=request.work(connection))
    except Exception as error:
        if not connection.in_transaction:  # SQLite gave up all of it, as on a full disk
            raise
        connection.execute("ROLLBACK TO request")
        outcome = _Outcome(request=request, error=_explain(error))
    connection.execute("RELEASE request")
    return outcome


def _explain(error: Exception) -> Exception:
    if isinstance(error, sqlite3.IntegrityError):
        return LedgerError(
            f"the ledger refuses a contradiction: {error}; each session, turn and answer is written once"
        )
    if isinstance(error, sqlite3.Error):
        return LedgerError(f"the ledger could not be written: {error}")
    return error
