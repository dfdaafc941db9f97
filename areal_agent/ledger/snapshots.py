"""Snapshots of a ledger on a shared disk: everything once an incarnation, and then only what was added since.

::

    000003-000001/   ledger.sqlite  ledger-w0.sqlite ...  manifest.json    incarnation 3: all of it
    000003-000002/   the same files, with the sessions, turns and endings added since, and all of the bookkeeping

A part is made beside the ledger, since SQLite wants a local disk, copied under a hidden name, and published in one
rename; then those of earlier incarnations are removed. What a run has recorded of a session never changes, so rows are
found by their numbers, while the bookkeeping of a part replaces the one before. `restore` puts the parts together. The
images of a run with a shared disk are there from the first (`files.RunFolder`): they are in no part.
"""

import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from areal_agent.errors import LedgerError
from areal_agent.files import MANIFEST, bring_to_disk, encode_manifest, read_intact, require_claim, sync
from areal_agent.ledger.encoding import encode_note
from areal_agent.ledger.files import reading, require_plain
from areal_agent.ledger.questions import CLAIM_NOTE
from areal_agent.ledger.writes import set_note

GROWING = ("sessions", "turns", "completions", "endings")
"""The tables whose rows are numbered as they come and stay as they are."""

Ends = Mapping[str, int]
"""The number of the last row of each growing table."""


class SnapshotFolder:
    """Keeps one snapshot in `directory` for one incarnation of a run: as many parts as `add` was called."""

    def __init__(self, ledger: Path, directory: Path, *, checkpoints: Path, incarnation: int) -> None:
        """`checkpoints` is the directory whose claim allows to publish."""
        self._ledger = ledger
        self._directory = directory
        self._checkpoints = checkpoints
        self._incarnation = incarnation
        self._ends: Mapping[str, Ends] = {}  # by file, of the parts published so far
        self._number = 0

    def add(self, step: int) -> Path:
        """Bring the snapshot up to date, as that of a checkpoint of `step`; return the new part. Blocks.

        Raises TakenOver once a later incarnation has claimed the run, LedgerError when it cannot be written.
        """
        part = self._ledger.with_name(".snapshot")
        hidden = self._directory / f".writing-{self._incarnation:06d}"
        target = self._directory / f"{self._incarnation:06d}-{self._number + 1:06d}"
        try:
            for folder in (part, hidden):
                shutil.rmtree(folder, ignore_errors=True)
            part.mkdir()
            ends = self._write(part)
            (part / MANIFEST).write_bytes(encode_manifest(part, {"step": step}))
            hidden.mkdir()  # without its parents: where they are missing, the shared disk is away
            shutil.copytree(part, hidden, dirs_exist_ok=True)
            bring_to_disk(hidden)
            require_claim(self._checkpoints, self._incarnation)
            hidden.rename(target)
            sync(self._directory)
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"the ledger's snapshot in {self._directory} could not be written: {error}") from error
        finally:
            for folder in (part, hidden):
                shutil.rmtree(folder, ignore_errors=True)
        self._ends, self._number = ends, self._number + 1
        for path in _parts(self._directory):
            if path.name.partition("-")[0] != target.name.partition("-")[0]:
                shutil.rmtree(path, ignore_errors=True)
        return target

    def _write(self, part: Path) -> Mapping[str, Ends]:
        """Write what was added to every file. All are read in one state, the bookkeeping first."""
        ends: dict[str, Ends] = {}
        with reading(self._ledger) as snapshot:
            for connection in snapshot:
                name = Path(connection.execute("PRAGMA database_list").fetchone()[2]).name
                with closing(sqlite3.connect(part / name, isolation_level=None)) as copy:
                    _copy(connection, copy, self._ends.get(name))
                ends[name] = {
                    table: connection.execute(f"SELECT coalesce(max(number), 0) FROM main.{table}").fetchone()[0]
                    for table in GROWING
                }
        return ends


def restore(directory: Path, ledger: Path, *, claimed: int) -> int:
    """Make a ledger from its snapshot in `directory`; return the step of the checkpoint that it belongs to. Blocks.

    The next incarnation will come after `claimed`. Raises LedgerError when there is no snapshot, or a damaged one.
    """
    newest = max((path.name.partition("-")[0] for path in _parts(directory)), default="")
    parts = [path for path in _parts(directory) if path.name.startswith(f"{newest}-")]
    if not parts:
        raise LedgerError(f"{directory} has no snapshot: the run was lost before its first checkpoint; start it anew")
    try:
        step = [int(read_intact(part)["step"]) for part in parts][-1]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{directory}, {newest}: {error}; delete that part and those after it, to restore the ones before"
        ) from None
    for part in parts:
        for source in part.glob("*.sqlite"):
            require_plain(source)
            target = ledger.with_name(source.name)
            if target.exists():
                _append(source, target)
            else:
                shutil.copyfile(source, target)
                target.chmod(0o600)
    with closing(sqlite3.connect(ledger)) as connection, connection:
        set_note(connection, CLAIM_NOTE, encode_note(CLAIM_NOTE, claimed))
    return step


def _copy(source: sqlite3.Connection, copy: sqlite3.Connection, ends: Ends | None) -> None:
    """Copy a file, or what was added to it after `ends`."""
    if ends is None:
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log
        return
    copy.execute("PRAGMA synchronous = OFF")
    copy.execute("BEGIN")
    for table, sql in source.execute("SELECT name, sql FROM main.sqlite_master WHERE type = 'table'").fetchall():
        copy.execute(sql)
        rows = source.execute(f"SELECT * FROM main.{table} {f'WHERE number > {ends[table]}' if table in ends else ''}")
        copy.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows.description))})", rows)
    copy.execute("COMMIT")


def _append(part: Path, target: Path) -> None:
    with closing(sqlite3.connect(target, isolation_level=None, uri=True)) as connection:
        connection.execute("ATTACH ? AS part", (f"{part.absolute().as_uri()}?immutable=1",))  # shared: takes no lock
        connection.execute("BEGIN")
        for (table,) in connection.execute("SELECT name FROM part.sqlite_master WHERE type = 'table'").fetchall():
            if table not in GROWING:
                connection.execute(f"DELETE FROM main.{table}")
            connection.execute(f"INSERT INTO main.{table} SELECT * FROM part.{table}")
        connection.execute("COMMIT")


def _parts(directory: Path) -> Sequence[Path]:
    return sorted(directory.glob("[0-9]*-[0-9]*"))
