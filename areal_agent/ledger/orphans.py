"""The shards of workers that are gone: what they left open ends, and their write-ahead logs go into the files.

Blocking; call it in a thread. It knows nothing of the coordinator.
"""

from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from areal_agent.errors import LedgerError
from areal_agent.ledger.lock import FileLock
from areal_agent.ledger.opening import open_for_writing
from areal_agent.ledger.session_writes import end_orphans
from areal_agent.ledger.tables import FileKind


def end_orphans_of(shards: Iterable[Path]) -> tuple[str, ...]:
    """End what is open in shards whose workers are gone; the ids of those sessions.

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
        ended = end_orphans(connection)
        connection.execute("COMMIT")
        return ended


def fold(shards: Iterable[Path]) -> None:
    """Leave one file of each shard that nobody writes to any more: the last connection to close folds in its log."""
    for path in shards:
        try:
            lock = FileLock.take(path, is_shard=True)
        except LedgerError:  # a worker outlives its run; the log beside the file is read as well as the file
            continue
        try:
            open_for_writing(path, FileKind.SHARD, create=True).close()
        finally:
            lock.release()
