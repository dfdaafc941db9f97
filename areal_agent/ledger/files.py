"""The SQLite files of one ledger: their tables and versions, how a file is opened, locked and upgraded, and snapshots.

::

    ledger.sqlite        the coordinator's: bookkeeping of all sessions, and sessions of its own
    ledger-w0.sqlite     a worker's shard: the sessions that it rolled out
    ledger-w1.sqlite     ...
    images/              the images that turns name, each once, by its SHA-256 (areal_agent/images.py)

Within a file, sessions are numbered in the order of opening and its other tables refer to them by number; the
bookkeeping refers to them by id. Nothing is stored twice: a turn stores only the new tokens of its prompt and only the
new messages of its request.

Each file has one live writer, which holds the kernel's lock on a lock file. The kernel frees the lock when the process
ends in any way, so a left-over lock file locks nothing. A file of an older version is upgraded in place when it is
opened for writing. Readers never change a file: `LedgerFiles` reads an upgraded copy.
"""

import fcntl
import os
import re
import shutil
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from areal_agent.errors import ConfigError, LedgerDamaged, LedgerError

FILE_NAME = "ledger.sqlite"
VERSION = 5
"""The version of the tables, kept by SQLite as `user_version`. Raise it with every change and add to UPGRADES."""

NO_ROOM_BYTES = 2**16
"""A disk with less room is full: SQLite takes a log's index in pieces of 32 KiB."""
NO_DIGEST = ""
"""The digest of an ending that version 2 wrote: nothing proves that the ending is unchanged."""

TOKENS_ONLY = "tokens:"
"""The prefix of a lease's digest that version 2 wrote: it proves what was sampled, but not what was earned."""


class FileKind(IntEnum):
    """The kind of a ledger's file, kept by SQLite as `application_id`."""

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
    images TEXT,                     -- JSON: [[digest, start, end], ...] in new_prompt_ids; NULL: none
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
    num_returned INTEGER NOT NULL,
    trainer TEXT                     -- JSON: how its trainer was set up; NULL: it trained nothing, or was older
);
CREATE TABLE notes (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL              -- JSON
);
"""

STEP_TABLE = """
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    process INTEGER NOT NULL REFERENCES incarnations (number),
    incarnation INTEGER NOT NULL,    -- of the weights that the step began with; a gateway elsewhere may count otherwise
    sessions TEXT NOT NULL,          -- JSON: their ids, in the order of the batch
    teacher BLOB,                    -- float32, little-endian: what a teacher's server says of the loss tokens
    inputs TEXT NOT NULL,            -- JSON: digests of what the trainer was given, by field
    weights TEXT NOT NULL            -- digest of the weights that the step made
);
"""

TABLES = {FileKind.COORDINATOR: SESSION_TABLES + BOOKKEEPING_TABLES + STEP_TABLE, FileKind.SHARD: SESSION_TABLES}

_SESSIONS_FROM_2 = f"""
ALTER TABLE endings ADD COLUMN digest TEXT NOT NULL DEFAULT '{NO_DIGEST}';
CREATE INDEX IF NOT EXISTS session_of_key ON sessions (key_hash);
"""
_LEASES_FROM_2 = f"UPDATE leases SET digest = '{TOKENS_ONLY}' || digest;"

UPGRADES: Mapping[int, Mapping[FileKind, str]] = {
    2: {FileKind.COORDINATOR: _SESSIONS_FROM_2 + _LEASES_FROM_2, FileKind.SHARD: _SESSIONS_FROM_2},
    3: {FileKind.COORDINATOR: f"ALTER TABLE incarnations ADD COLUMN trainer TEXT; {STEP_TABLE}", FileKind.SHARD: ""},
    4: dict.fromkeys(FileKind, "ALTER TABLE turns ADD COLUMN images TEXT;"),
}
"""SQL that brings a file from the given version to the next. It claims nothing that the older version did not record.
"""

OLDEST_VERSION = min(UPGRADES)


class FileLock:
    """An exclusive lock on one file of a ledger, held from `take` until `release`."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    @classmethod
    def take(cls, path: Path, *, is_shard: bool) -> Self:
        """Take the lock. Raises LedgerError, naming the folder, when another process holds it."""
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
            writer = f"a worker is still writing to {path.name} of" if is_shard else "another process is writing to"
            raise LedgerError(f"{writer} the run folder {path.parent}; wait until it has ended, or stop it") from None
        return cls(fd)

    def release(self) -> None:
        """Free the lock. Harmless when repeated."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_for_writing(path: Path, kind: FileKind, *, create: bool) -> sqlite3.Connection:
    """Open the only writing connection to a file. With `create`, make it if needed, readable by its owner only."""
    if create:
        _make_file(path)
    with _connected(path, "rw") as connection:
        if create and _is_empty(connection):
            _change(connection, f"{TABLES[kind]} PRAGMA application_id = {kind.value};")
        _upgrade(connection, _version(connection, path, kind), kind)
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise LedgerError(f"the ledger {path} has no write-ahead log (mode {mode!r}): put it on a local disk")
        connection.execute("PRAGMA synchronous = FULL")  # a turn that was acknowledged survives a power cut, too
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


def open_for_reading(path: Path, kind: FileKind, coordinator: Path | None = None) -> sqlite3.Connection:
    """Open a read-only connection to a file of the current version, even while a run writes to it.

    With `coordinator`, queries find the tables of both files.
    """
    with _connected(path, "ro") as connection:
        version = _version(connection, path, kind)
        assert version == VERSION, f"{path} has version {version}: read a copy that is upgraded"
        if coordinator is not None:
            connection.execute("ATTACH ? AS coordinator", (_uri(coordinator, "ro"),))
        return connection


def require_intact(path: Path) -> None:
    """Raise LedgerDamaged unless SQLite finds the ledger's file and its shards in order. It reads them whole."""
    for file in (path, *shard_paths(path).values()):
        try:
            with _connected(file, "ro") as connection, closing(connection):
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        except LedgerError as error:
            if not is_damage(error.__cause__):
                raise
            found = str(error.__cause__)
        if found != "ok":
            raise LedgerDamaged(
                f"the ledger's file {file} is damaged ({' '.join(found.split())}), so its run cannot be resumed; "
                f"python -m areal_agent.ledger verify {path.parent} says what of it can be read"
            )


def is_damage(error: BaseException | None) -> bool:
    """Return whether SQLite has found a file damaged."""
    damages = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode & 0xFF in damages


def has_tables(path: Path) -> bool:
    """Return whether a file has its tables; a shard that its worker has just created may have none."""
    with _connected(path, "ro") as connection, closing(connection):
        return not _is_empty(connection)


def is_older(path: Path, kind: FileKind) -> bool:
    """Return whether a file must be upgraded before it can be read."""
    with _connected(path, "ro") as connection, closing(connection):
        return _version(connection, path, kind) < VERSION


def copy_upgraded(path: Path, kind: FileKind, folder: Path) -> Path:
    """Copy a file of an older version into `folder`, under the same name, and upgrade the copy."""
    copy = folder / path.name
    _make_file(copy)
    with _connected(path, "ro") as connection, closing(connection), _connected(copy, "rw") as target, closing(target):
        connection.backup(target)
        _upgrade(target, _version(target, path, kind), kind)
    return copy


def _upgrade(connection: sqlite3.Connection, version: int, kind: FileKind) -> None:
    if version < VERSION:
        _change(connection, "".join(UPGRADES[older][kind] for older in range(version, VERSION)))


def _change(connection: sqlite3.Connection, script: str) -> None:
    """Make or upgrade the tables in one transaction: a crash leaves the file as it was."""
    connection.executescript(f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {VERSION}; COMMIT;")


def _make_file(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be made: {error.strerror}") from None


@contextmanager
def _connected(path: Path, mode: str) -> Generator[sqlite3.Connection]:
    """Connect to a file. An error inside the block closes the connection, and SQLite's errors become LedgerErrors."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}; name the folder of a run")
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(
            _uri(path, mode),
            uri=True,
            isolation_level=None,  # transactions are begun and ended explicitly
            check_same_thread=False,  # opened in one thread, used by exactly one other
        )
        yield connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            raise LedgerError(_cannot(path, "opened", error)) from error
        raise


def _uri(path: Path, mode: str) -> str:
    """The URI of a file. SQLite keeps a log's index beside the file; in a folder that cannot be written to, a file
    without a log is opened as immutable.
    """
    log = path.with_name(f"{path.name}-wal")
    is_fixed = mode == "ro" and not os.access(path.parent, os.W_OK) and not (log.exists() and log.stat().st_size)
    return f"{path.absolute().as_uri()}?mode={mode}{'&immutable=1' if is_fixed else ''}"


def require_plain(path: Path) -> None:
    """Raise LedgerError for a file with a view, a trigger or a virtual table."""
    with _connected(path, "ro") as connection, closing(connection):
        _require_tables(connection, path)


def _require_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerError for a view, a trigger or a virtual table, whose SQL would run within ours, perhaps for ever."""
    odd = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR coalesce(rootpage, 0) = 0"
    try:
        found = connection.execute(odd).fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite's own message may have damaged bytes
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        return  # then SQLite runs nothing on that file, and whoever reads it reports the damage
    if found:
        raise LedgerError(f"{path} has the {found[0]} {found[1]!r}, and a ledger has only tables; do not use that file")


def _version(connection: sqlite3.Connection, path: Path, kind: FileKind) -> int:
    """Return the version of a file. Raises LedgerError when it is of another kind or cannot be upgraded."""
    _require_tables(connection, path)
    application_id = _pragma(connection, "application_id")
    if application_id not in tuple(FileKind):
        raise LedgerError(
            f"{path} is not a ledger of areal_agent, or its run ended before its tables were made; start a new run"
        )
    if application_id != kind:
        raise LedgerError(
            f"{path} is a worker's shard, not the ledger that it belongs to; name that ledger"
            if kind is FileKind.COORDINATOR
            else f"{path} is a whole ledger, not a worker's shard; give the worker a file of its own"
        )
    version = _pragma(connection, "user_version")
    if version > VERSION:
        raise LedgerError(
            f"the ledger {path} was written with version {version} of the tables by a newer areal_agent, and this one "
            f"reads versions {OLDEST_VERSION} to {VERSION}; install the newer release"
        )
    if version < OLDEST_VERSION:
        raise LedgerError(
            f"the ledger {path} was written with version {version} of the tables by an older areal_agent, and this one "
            f"reads versions {OLDEST_VERSION} to {VERSION}; use the release that wrote it"
        )
    return version


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def ledger_in(run_dir: Path) -> Path:
    """Return the path of a run's ledger, given its folder or the file. Raises ConfigError when there is none."""
    if run_dir.is_file():
        return run_dir
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run folder {str(run_dir)!r}; name the folder that the run printed at its end")
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"{str(run_dir)!r} has no {FILE_NAME}, so it is not a run folder; name the folder of a run")
    return path


@contextmanager
def reading(path: Path) -> Generator["Snapshot"]:
    """Read one state of a whole ledger, also of a live run. Errors of SQLite inside become LedgerErrors."""
    with closing(LedgerFiles(path)) as files, naming(path), files.snapshot() as snapshot:
        yield snapshot


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Turn errors of SQLite inside into LedgerErrors that name the ledger and the remedy."""
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(_cannot(path, "read", error)) from error


def is_disk_full(path: Path, error: sqlite3.Error) -> bool:
    """Return whether this failed for want of room. SQLite calls it an I/O error where the log's index cannot grow."""
    kind = error.sqlite_errorcode & 0xFF  # without its details
    has_no_room = kind == sqlite3.SQLITE_IOERR and shutil.disk_usage(path.parent).free < NO_ROOM_BYTES
    return kind == sqlite3.SQLITE_FULL or has_no_room


def _cannot(path: Path, what: str, error: sqlite3.Error) -> str:
    is_locked = error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    if is_locked:
        remedy = "another program holds it; wait until that has ended"
    elif is_disk_full(path, error):
        remedy = "make room there"
    else:
        remedy = "restore it from a copy, or start a new run"
    return f"the ledger {path} cannot be {what}: {error}; {remedy}"


Snapshot = Sequence[sqlite3.Connection]
"""One connection per file, the coordinator's first. Each session is in one file, and every connection sees the
bookkeeping.
"""


SHARD_NAME = re.compile(r"w\d+")
"""The name of a shard. Other files beside the ledger, for example copies of it, do not match."""


def shard_path(ledger: Path, name: str) -> Path:
    """The path of a worker's shard.

    >>> shard_path(Path("runs/quickstart/ledger.sqlite"), "w0").name
    'ledger-w0.sqlite'
    """
    if not SHARD_NAME.fullmatch(name):
        raise LedgerError(f"{name!r} is not the name of a shard; use 'w' and a number, for example 'w0'")
    return ledger.with_name(f"{ledger.stem}-{name}{ledger.suffix}")


def shard_paths(ledger: Path) -> Mapping[str, Path]:
    """The existing shards, by name."""
    prefix = f"{ledger.stem}-"
    named = {path.stem.removeprefix(prefix): path for path in sorted(ledger.parent.glob(f"*{ledger.suffix}"))}
    return {name: path for name, path in named.items() if SHARD_NAME.fullmatch(name)}


class LedgerFiles:
    """Read-only connections to all files of a ledger. Use it from one thread at a time.

    A file of an older version is read from an upgraded copy in a temporary folder, made when the file is first opened.
    """

    def __init__(self, path: Path) -> None:
        """Open the coordinator's file. Raises LedgerError when it is missing, damaged or of an unsupported version."""
        self._path = path
        self._copies: TemporaryDirectory[str] | None = None
        self._connections: dict[Path, sqlite3.Connection] = {}  # by file, the coordinator's first
        try:
            self._coordinator = self._current(path, FileKind.COORDINATOR)
            self._connections[path] = open_for_reading(self._coordinator, FileKind.COORDINATOR)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def snapshot(self) -> Generator[Snapshot]:
        """Hold one state of every existing file, whatever is written meanwhile.

        The bookkeeping is read first, so every session that it refers to is in the snapshot.
        """
        self._open_new_shards()
        connections = tuple(self._connections.values())
        try:
            for connection in connections:
                connection.execute("BEGIN")
                connection.execute("SELECT 1 FROM leases LIMIT 1").fetchall()  # the first read fixes the snapshot
            for connection in connections:
                connection.execute("SELECT 1 FROM sessions LIMIT 1").fetchall()
            yield connections
        finally:
            for connection in connections:
                if connection.in_transaction:
                    connection.execute("COMMIT")

    def close(self) -> None:
        """Close all connections and delete the copies. Harmless when repeated."""
        for connection in self._connections.values():
            connection.close()
        if self._copies is not None:
            self._copies.cleanup()

    def _open_new_shards(self) -> None:
        for path in shard_paths(self._path).values():
            if path not in self._connections and has_tables(path):
                shard = self._current(path, FileKind.SHARD)
                self._connections[path] = open_for_reading(shard, FileKind.SHARD, self._coordinator)

    def _current(self, path: Path, kind: FileKind) -> Path:
        """The path of the file itself, or of its upgraded copy when it is of an older version."""
        if not is_older(path, kind):
            return path
        if self._copies is None:
            self._copies = TemporaryDirectory(prefix="ledger-")
        return copy_upgraded(path, kind, Path(self._copies.name))
