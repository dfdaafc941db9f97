"""One file of sessions and its writer thread (all that a gateway needs), and care of dead shards.

The writer thread puts everything that is queued into one transaction and answers the callers after the commit::

    callers (event loop) ── work, future ──▶ group ──▶ writer thread: BEGIN, work*, COMMIT ──▶ futures resolve

One commit serves everybody in the group (group commit). Work that arrives during a commit, in the same turn of the
event loop, or within GROUP_S of the last group goes into the next group: a quiet ledger answers at once, and a busy
one commits no more often. Work that fails is undone alone; the rest of its group stays.

The functions at the end settle shards whose workers are gone; they block, so call them in a thread.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from areal_agent.errors import DiskFull, LedgerError, WrittenBefore
from areal_agent.ledger import writes
from areal_agent.ledger.encoding import (
    CompletionRow,
    EndingRow,
    TurnRow,
    encode_completion,
    encode_ending,
    encode_turn,
)
from areal_agent.ledger.files import FileKind, FileLock, has_tables, is_disk_full, is_older, open_for_writing
from areal_agent.types import SessionRecord, Trajectory, Turn

Given = ParamSpec("Given")
Result = TypeVar("Result")

GROUP_S = 0.002
"""The least time between two groups. Each group costs a commit, two thread switches and a wake-up."""


@dataclass(kw_only=True, slots=True)
class Request:
    """Work for the writer thread, which sets `error` when it failed, otherwise `result`."""

    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class GroupCommitWriter:
    """The writer thread and its connection. Use it from the event loop that made it; end it by `stop`, then `close`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
        self._waiting: list[Request] = []
        self._is_busy = False  # a group is being committed, or about to be sent
        self._sent_s = -GROUP_S  # when the last group was sent, by the loop's clock
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        # A daemon, so that it does not keep a dying process alive: nobody was promised what it has not committed.
        self._thread = threading.Thread(target=self._serve, name="ledger-writer", daemon=True)
        self._thread.start()

    async def run(
        self, work: Callable[Concatenate[sqlite3.Connection, Given], Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """Run `work` in the next transaction; return its result, or raise its error, once that is durable.

        When the caller is cancelled meanwhile, the work may be done or not.
        """
        if self._is_closed:
            raise LedgerError("the ledger is closed: nothing can be written any more; open it again")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._waiting.append(Request(work=lambda connection: work(connection, *args, **kwargs), future=future))
        if not self._is_busy:
            self._is_busy = True
            self._send_soon()
        return await future

    def stop(self) -> None:
        """Accept no more work. Call it in the event loop, so that nothing is queued behind the end mark."""
        if not self._is_closed:
            self._is_closed = True
            self._send()
            self._hand_over(None)

    def close(self) -> None:
        """Block until everything is committed and the file is closed; call `stop` first. Harmless when repeated."""
        self._finish()
        self._connection.close()

    def _hand_over(self, group: Sequence[Request] | None) -> None:
        """Give the writer thread a group, or its end mark. It answers by `_deliver`."""
        self._queue.put(group)

    def _finish(self) -> None:
        self._thread.join()

    def _send_soon(self) -> None:
        self._loop.call_at(self._sent_s + GROUP_S, self._send)

    def _send(self) -> None:
        """Hand all waiting requests to the writer thread. Runs in the event loop."""
        group, self._waiting = self._waiting, []
        self._is_busy = bool(group)
        if group:
            self._sent_s = self._loop.time()
            self._hand_over(group)

    def _serve(self) -> None:
        while (group := self._queue.get()) is not None:
            self._commit(group)
            self._loop.call_soon_threadsafe(self._deliver, group)

    def _deliver(self, group: Sequence[Request]) -> None:
        """Answer the callers of a group, and send the requests that arrived meanwhile. Runs in the event loop."""
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._send_soon()
        for request in group:
            if request.future.done():  # the caller was cancelled
                continue
            if request.error is None:
                request.future.set_result(request.result)
            else:
                request.future.set_exception(request.error)

    def _commit(self, group: Sequence[Request]) -> None:
        """Run a group in one transaction. If that fails (a full disk, for example), none of it has happened."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for request in group:
                _perform(self._connection, request)
            self._connection.execute("COMMIT")
        except Exception as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            failure = _explain(error, self._connection)
            for request in group:
                request.error = failure


def _perform(connection: sqlite3.Connection, request: Request) -> None:
    """Run one request's work inside a savepoint. If it fails, it is undone and its exception becomes the answer."""
    connection.execute("SAVEPOINT request")
    try:
        request.result = request.work(connection)
    except Exception as error:
        if not connection.in_transaction:  # SQLite rolled the whole transaction back, as on a full disk
            raise
        connection.execute("ROLLBACK TO request")
        request.error = _explain(error, connection)
    connection.execute("RELEASE request")


def _explain(error: Exception, connection: sqlite3.Connection) -> Exception:
    if isinstance(error, sqlite3.IntegrityError):
        return WrittenBefore(
            f"this write contradicts the ledger: {error}; each session, turn and answer is written once"
        )
    if isinstance(error, sqlite3.Error):
        path = Path(connection.execute("PRAGMA database_list").fetchone()[2])
        if is_disk_full(path, error):
            return DiskFull.at(path)
        return LedgerError(f"the ledger could not be written: {error}")
    return error


class LedgerShard:
    """One file of sessions: the `protocols.Journal` of a rollout worker, beside the ledger of its run.

    ::

        shard = await LedgerShard.open(shard_path(folder / "ledger.sqlite", "w0"), create=True)
        ...
        await shard.aclose()

    All methods raise LedgerError when a rule would be broken, when the file cannot be written, and once it is closed.
    """

    def __init__(self, lock: FileLock, writer: GroupCommitWriter) -> None:
        self._lock = lock
        self.writer = writer

    @classmethod
    async def open(cls, path: str | Path, *, create: bool, kind: FileKind = FileKind.SHARD) -> Self:
        """Open the file. If there is none, `create` makes it; otherwise that is an error.

        A file of an older version is upgraded. Raises LedgerError when another live process writes to it, or when its
        version cannot be upgraded.
        """
        path = Path(path)
        lock = await asyncio.to_thread(FileLock.take, path, is_shard=kind is FileKind.SHARD)
        try:
            connection = await asyncio.to_thread(open_for_writing, path, kind, create=create)
        except BaseException:
            lock.release()
            raise
        return cls(lock, GroupCommitWriter(connection))

    async def aclose(self) -> None:
        """Commit what is queued, close the file and free the lock. Idempotent, and completed even when cancelled."""
        self.writer.stop()
        await asyncio.shield(asyncio.to_thread(self.close))

    def close(self) -> None:
        """Block until everything is committed and the file is closed; call `writer.stop` first."""
        self.writer.close()
        self._lock.release()

    async def open_session(self, session: SessionRecord) -> None:
        await self.writer.run(writes.open_session, session)

    async def append_turn(self, session_id: str, turn: Turn) -> None:
        """Add a turn to an open session. The cost depends on its new tokens and messages only, not on the history."""
        await self.append_rows(session_id, *rows_of(turn))

    async def append_rows(self, session_id: str, turn: TurnRow, completions: Sequence[CompletionRow]) -> None:
        """Add an encoded turn to an open session."""
        await self.writer.run(writes.append_turn, session_id, turn, completions)

    async def close_session(self, trajectory: Trajectory) -> None:
        """End a session. A training trajectory waits from now on, whatever its status."""
        await self.close_with(trajectory.session_id, encode_ending(trajectory))

    async def close_with(self, session_id: str, ending: EndingRow) -> None:
        """End a session with an encoded ending."""
        await self.writer.run(writes.close_session, session_id, ending)


def rows_of(turn: Turn) -> tuple[TurnRow, tuple[CompletionRow, ...]]:
    """Encode a turn and its completions."""
    return encode_turn(turn), tuple(encode_completion(completion) for completion in turn.completions)


def upgrade_shards(shards: Iterable[Path]) -> None:
    """Upgrade shards of an older version. Raises LedgerError when a worker still writes to one of them."""
    for path in shards:
        if has_tables(path) and is_older(path, FileKind.SHARD):
            _open_and_close(path, FileLock.take(path, is_shard=True))


def end_orphans_of(shards: Iterable[Path]) -> tuple[str, ...]:
    """End the open sessions in shards whose workers are gone, and return their ids.

    Raises LedgerError, with nothing changed, when a worker still writes to one of them.
    """
    shards = tuple(shards)
    with ExitStack() as locks:
        for path in shards:
            locks.callback(FileLock.take(path, is_shard=True).release)
        return tuple(session_id for path in shards for session_id in _end_orphans_in(path))


def _end_orphans_in(path: Path) -> tuple[str, ...]:
    with closing(open_for_writing(path, FileKind.SHARD, create=True)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        ended = writes.end_orphans(connection)
        connection.execute("COMMIT")
        return ended


def fold(shards: Iterable[Path]) -> None:
    """Fold the write-ahead log of each shard without a writer into its file, as closing the last connection does."""
    for path in shards:
        try:
            lock = FileLock.take(path, is_shard=True)
        except LedgerError:  # the worker outlives its run; readers read the log along with the file
            continue
        _open_and_close(path, lock)


def _open_and_close(path: Path, lock: FileLock) -> None:
    try:
        open_for_writing(path, FileKind.SHARD, create=True).close()
    finally:
        lock.release()
