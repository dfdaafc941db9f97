"""The files of one ledger: where its shards lie, and one state of all of them for whoever reads.

::

    ledger.sqlite        the coordinator's: bookkeeping of all sessions, and sessions of its own
    ledger-w0.sqlite     a worker's shard: the sessions that it rolled out
    ledger-w1.sqlite     ...

It knows nothing of what is asked.

The tables of a ledger's files and their version. It knows nothing of connections and records.

Every file has tables of sessions; the coordinator's has the bookkeeping of all sessions, its shards' too. Within a
file, sessions are numbered in the order in which they were opened, and its other tables refer to them by that number;
the bookkeeping knows them by id. Nothing is stored twice: of a turn's prompt only the new tokens, of its messages only
the new ones.

One live writer a file. It knows nothing of what is written.

The lock is the kernel's: it ends with the process that holds it, however that ends, and a left-over file locks nothing.

How a file of a ledger is made, opened and checked. It knows its tables by name only (tables.py), and no records.
"""

import fcntl
import os
import re
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Self

from areal_agent.errors import LedgerError

VERSION = 3
"""Goes up with every change of the tables; SQLite keeps it in the file as `user_version`."""


class FileKind(IntEnum):
    """Which file of a ledger it is. SQLite keeps it in the file, as its `application_id`."""

    COORDINATOR = 0x41524C47  # "ARLG"
    SHARD = 0x41524C53  # "ARLS"


SESSION_TABLES = """
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    purpose TEXT NOT NULL,
    seed INTEGER NOT NULL,
    key_hash TEXT NOT NULL,
    started_s REAL NOT NULL
);
CREATE INDEX session_of_key ON sessions (key_hash);
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,
    session INTEGER NOT NULL REFERENCES sessions (number),
    id TEXT NOT NULL,
    parent TEXT,
    fork_at INTEGER NOT NULL,
    fork_reason TEXT,
    new_prompt_ids BLOB NOT NULL,    -- int32, little-endian
    request_delta TEXT NOT NULL,     -- JSON: messages
    sampling TEXT NOT NULL,          -- JSON: SamplingParams
    started_s REAL NOT NULL,
    ended_s REAL NOT NULL,
    UNIQUE (session, id)
);
CREATE TABLE completions (
    number INTEGER PRIMARY KEY,
    turn INTEGER NOT NULL REFERENCES turns (number),
    id TEXT NOT NULL UNIQUE,
    token_ids BLOB NOT NULL,         -- int32, little-endian
    logprobs BLOB NOT NULL,          -- float32, little-endian
    versions TEXT NOT NULL,          -- JSON: [["0:7", start, end], ...]
    finish_reason TEXT NOT NULL,
    distribution TEXT NOT NULL
);
CREATE INDEX completions_of_turn ON completions (turn);
CREATE TABLE endings (
    number INTEGER PRIMARY KEY,      -- the order of closing
    session INTEGER NOT NULL UNIQUE REFERENCES sessions (number),
    status TEXT NOT NULL,
    error TEXT,
    final_reward REAL,               -- NULL: none was given
    rewards TEXT NOT NULL,           -- JSON: {completion id: reward}
    parts TEXT NOT NULL,             -- JSON: {name: reward}
    logged TEXT NOT NULL,            -- JSON
    undelivered TEXT NOT NULL,       -- JSON: [completion id, ...]
    ended_s REAL NOT NULL,
    digest TEXT NOT NULL             -- of the columns from status on: rewards that changed since are found
);
"""

BOOKKEEPING_TABLES = """
CREATE TABLE leases (
    session TEXT PRIMARY KEY,        -- its id; it may be in any file
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,            -- of what was sampled and earned, and of num_loss_tokens
    num_loss_tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX leases_of_step ON leases (step);
CREATE TABLE fates (
    session TEXT PRIMARY KEY,        -- its id; orphans need no row, their status is their fate
    trained_step INTEGER,
    dropped TEXT,
    CHECK ((trained_step IS NULL) != (dropped IS NULL))
) WITHOUT ROWID;
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY,
    path TEXT                        -- NULL: known from a restart only, its own commit was lost in the crash
);
CREATE TABLE incarnations (
    number INTEGER PRIMARY KEY,
    checkpoint_step INTEGER NOT NULL,
    started_s REAL NOT NULL,
    num_orphans INTEGER NOT NULL,
    num_returned INTEGER NOT NULL
);
CREATE TABLE notes (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL              -- JSON
);
"""

TABLES = {FileKind.COORDINATOR: SESSION_TABLES + BOOKKEEPING_TABLES, FileKind.SHARD: SESSION_TABLES}


class FileLock:
    """An exclusive lock on a file of a ledger, from `take` until `release`."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def take(cls, path: Path, *, is_shard: bool) -> Self:
        """Raises LedgerError, naming the folder, when another process holds it."""
        try:
            fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise LedgerError(
                f"the ledger {path} cannot be locked: {error.strerror}; check that its folder exists and "
                "that you may write there"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise LedgerError(
                    f"the ledger {path} cannot be locked: {error.strerror}; put the run folder on a local disk"
                ) from None
            raise LedgerError(_taken(path, is_shard=is_shard)) from None
        return cls(fd)

    def release(self) -> None:
        """Harmless when it was released before."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _taken(path: Path, *, is_shard: bool) -> str:
    if is_shard:
        return (
            f"a worker is still writing to {path.name} of the run folder {path.parent}; wait until it has ended, "
            "or stop it"
        )
    return f"another process is writing to the run folder {path.parent}; wait until that run has ended, or stop it"


def open_for_writing(path: Path, kind: FileKind, *, create: bool) -> sqlite3.Connection:
    """The one connection that writes. With `create` the file is made when there is none, readable by its owner only."""
    if create:
        _make_file(path)
    connection = _connect(path, "rw")
    try:
        if create and _is_empty(connection):
            _make_tables(connection, kind)
        _check(connection, path, kind)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerError(f"the ledger {path} has no write-ahead log (mode {mode!r}): put it on a local disk")
        connection.execute("PRAGMA synchronous = FULL")  # an acknowledged turn survives a power cut, too
        connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error as error:
        connection.close()
        raise _unreadable(path, error) from error
    except LedgerError:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection to the coordinator's file that cannot write. It may be open while a run writes."""
    connection = _connect(path, "ro")
    try:
        _check(connection, path, FileKind.COORDINATOR)
    except sqlite3.Error as error:
        connection.close()
        raise _unreadable(path, error) from error
    except LedgerError:
        connection.close()
        raise
    return connection


def open_shard_for_reading(path: Path, coordinator: Path) -> sqlite3.Connection | None:
    """A connection that cannot write, to a shard and to the bookkeeping of its coordinator: queries find both.

    None while the shard has no tables: its worker is about to make them.
    """
    connection = _connect(path, "ro")
    try:
        if _is_empty(connection):
            connection.close()
            return None
        _check(connection, path, FileKind.SHARD)
        connection.execute("ATTACH ? AS coordinator", (_uri(coordinator, "ro"),))
    except sqlite3.Error as error:
        connection.close()
        raise _unreadable(path, error) from error
    except LedgerError:
        connection.close()
        raise
    return connection


def _make_file(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be made: {error.strerror}") from None


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}; name the folder of a run")
    try:
        return sqlite3.connect(
            _uri(path, mode),
            uri=True,
            isolation_level=None,  # transactions are begun and ended by name
            check_same_thread=False,  # opened in one thread, used by exactly one other
        )
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def _uri(path: Path, mode: str) -> str:
    return f"{path.absolute().as_uri()}?mode={mode}"


def _make_tables(connection: sqlite3.Connection, kind: FileKind) -> None:
    """All or nothing: a crash meanwhile leaves an empty file, which the next `create` fills."""
    connection.executescript(
        f"BEGIN IMMEDIATE; {TABLES[kind]} PRAGMA application_id = {kind.value}; "
        f"PRAGMA user_version = {VERSION}; COMMIT;"
    )


def _check(connection: sqlite3.Connection, path: Path, kind: FileKind) -> None:
    application_id = _pragma(connection, "application_id")
    if application_id not in tuple(FileKind):
        raise LedgerError(f"{path} is no ledger of areal_agent, or its run ended before it was made; start a new run")
    if application_id != kind:
        raise LedgerError(
            f"{path} is a worker's shard, not the ledger that it belongs to; name that"
            if kind is FileKind.COORDINATOR
            else f"{path} is a whole ledger, not a worker's shard of one; give the worker a file of its own"
        )
    version = _pragma(connection, "user_version")
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise LedgerError(
            f"the ledger {path} has version {version}, {age} than this areal_agent's ({VERSION}): "
            f"use the {age} release that wrote it"
        )


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _unreadable(path: Path, error: sqlite3.Error) -> LedgerError:
    return LedgerError(f"the ledger {path} cannot be opened: {error}; restore it from a copy, or start a new run")


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
