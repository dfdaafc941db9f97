"""The tables of a ledger, their version, and how the file is made and opened. It knows nothing of records.

Sessions are numbered in the order in which they were opened; the other tables refer to them by that number. Nothing
is stored twice: of a turn's prompt only the new tokens, of its messages only the new ones.
"""

import os
import sqlite3
from pathlib import Path

from areal_agent.errors import LedgerError

VERSION = 1
"""Goes up with every change of the tables; SQLite keeps it in the file as `user_version`."""

APPLICATION_ID = 0x41524C47
"""Tells a ledger from any other SQLite file ("ARLG")."""

TABLES = """
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
    ended_s REAL NOT NULL
);
CREATE TABLE leases (
    session INTEGER PRIMARY KEY REFERENCES sessions (number),
    step INTEGER NOT NULL,
    digest TEXT NOT NULL,
    num_loss_tokens INTEGER NOT NULL
);
CREATE TABLE fates (
    session INTEGER PRIMARY KEY REFERENCES sessions (number),
    trained_step INTEGER,
    dropped TEXT,
    CHECK ((trained_step IS NULL) != (dropped IS NULL))
);
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


def open_for_writing(path: Path, *, create: bool) -> sqlite3.Connection:
    """The one connection that writes. With `create` the file is made when there is none, readable by its owner only."""
    if create:
        _make_file(path)
    connection = _connect(path, "rw")
    try:
        if create and _is_empty(connection):
            _make_tables(connection)
        _check_version(connection, path)
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
    """A connection that cannot write. It may be open while a run writes."""
    connection = _connect(path, "ro")
    try:
        _check_version(connection, path)
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
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,  # transactions are begun and ended by name
            check_same_thread=False,  # opened in one thread, used by exactly one other
        )
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def _make_tables(connection: sqlite3.Connection) -> None:
    """All or nothing: a crash meanwhile leaves an empty file, which the next `create` fills."""
    connection.executescript(
        f"BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT;"
    )


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise LedgerError(f"{path} is no ledger of areal_agent, or its run ended before it was made; start a new run")
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
