"""The files of one ledger: where its shards lie, and one state of all of them for whoever reads.

::

    ledger.sqlite        the coordinator's: bookkeeping of all sessions, and sessions of its own
    ledger-w0.sqlite     a worker's shard: the sessions that it rolled out
    ledger-w1.sqlite     ...

It knows nothing of what is asked.
"""

import re
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_agent.errors import LedgerError
from areal_agent.ledger.opening import open_for_reading, open_shard_for_reading

Snapshot = Sequence[sqlite3.Connection]
"""A connection a file, the coordinator's first. A session is in one of them, and each sees the bookkeeping too."""


SHARD_NAME = re.compile(r"w\d+")
"""How shards are told from other files beside the ledger: a copy that somebody made of it is none."""


def shard_path(ledger: Path, name: str) -> Path:
    """Where the shard of a worker lies.

    >>> shard_path(Path("runs/quickstart/ledger.sqlite"), "w0").name
    'ledger-w0.sqlite'
    """
    if not SHARD_NAME.fullmatch(name):
        raise LedgerError(f"{name!r} is no name of a shard; name it 'w' and a number, for example 'w0'")
    return ledger.with_name(f"{ledger.stem}-{name}{ledger.suffix}")


def shard_paths(ledger: Path) -> Mapping[str, Path]:
    """The shards that are there now, by name."""
    prefix = f"{ledger.stem}-"
    named = {path.stem.removeprefix(prefix): path for path in sorted(ledger.parent.glob(f"*{ledger.suffix}"))}
    return {name: path for name, path in named.items() if SHARD_NAME.fullmatch(name)}


class LedgerFiles:
    """Connections to all files of a ledger that cannot write. Use it from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises LedgerError when the coordinator's file is missing, damaged, or of another version."""
        self._path = path
        self._coordinator = open_for_reading(path)
        self._shards: dict[Path, sqlite3.Connection] = {}

    @contextmanager
    def snapshot(self) -> Generator[Snapshot]:
        """One state of every file that is there now, whatever is written meanwhile.

        The bookkeeping is at most as new as any file of sessions, so that all it speaks of is there.
        """
        self._open_new_shards()
        connections = (self._coordinator, *self._shards.values())
        try:
            for connection in connections:
                connection.execute("BEGIN")
                connection.execute("SELECT 1 FROM leases LIMIT 1").fetchall()  # from here on its bookkeeping stands
            for connection in connections:
                connection.execute("SELECT 1 FROM sessions LIMIT 1").fetchall()
            yield connections
        finally:
            for connection in connections:
                if connection.in_transaction:
                    connection.execute("COMMIT")

    def close(self) -> None:
        """Harmless when repeated."""
        for connection in (self._coordinator, *self._shards.values()):
            connection.close()

    def _open_new_shards(self) -> None:
        for path in shard_paths(self._path).values():
            if path not in self._shards and (connection := open_shard_for_reading(path, self._path)):
                self._shards[path] = connection
