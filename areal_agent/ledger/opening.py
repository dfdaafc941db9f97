"""How a file of a ledger is made, opened and checked. It knows its tables by name only (tables.py), and no records."""

import os
import sqlite3
from pathlib import Path

from areal_agent.errors import LedgerError
from areal_agent.ledger.tables import TABLES, VERSION, FileKind


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
