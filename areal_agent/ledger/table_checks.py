"""The invariants that tables can break against each other, within a file and between files.

Most checks are a query that finds the offenders.
"""

import heapq
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from areal_agent.errors import LedgerError
from areal_agent.ledger import questions, reads
from areal_agent.ledger.files import Snapshot
from areal_agent.ledger.invariants import Invariant, Violation
from areal_agent.ledger.records import STATUS_NOTE, LedgerCounts
from areal_agent.types import SessionPurpose, Status


class _Search(NamedTuple):
    """A query of two columns: a session's id and what is wrong with it."""

    invariant: Invariant
    query: str


_HAS_BOOKKEEPING = "(s.id IN (SELECT session FROM leases) OR s.id IN (SELECT session FROM fates))"

_OF_SESSIONS = (
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is open, yet leased or of some fate' FROM sessions s "
        f"WHERE s.number NOT IN (SELECT session FROM endings) AND {_HAS_BOOKKEEPING}",
    ),
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is for ' || s.purpose || ', yet leased or of some fate' FROM sessions s "
        f"WHERE s.purpose != '{SessionPurpose.TRAIN}' AND {_HAS_BOOKKEEPING}",
    ),
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is an orphan, yet leased or of another fate' "
        "FROM sessions s JOIN endings e ON e.session = s.number "
        f"WHERE e.status = '{Status.ORPHAN}' AND {_HAS_BOOKKEEPING}",
    ),
)
"""What a file of sessions can break against the bookkeeping."""

_OF_BOOKKEEPING = (
    _Search(
        Invariant.ONE_FATE,
        "SELECT f.session, 'it is dropped(' || f.dropped || '), yet leased for step ' || l.step "
        "FROM fates f JOIN leases l ON l.session = f.session WHERE f.dropped IS NOT NULL",
    ),
    _Search(
        Invariant.ONE_FATE,
        "SELECT session, 'its fate is neither trained nor dropped, or both' FROM fates "
        "WHERE (trained_step IS NULL) = (dropped IS NULL)",
    ),
    _Search(
        Invariant.TRAINED,
        "SELECT f.session, 'it is trained(' || f.trained_step || '), yet ' || "
        "coalesce('leased for step ' || l.step, 'never leased') "
        "FROM fates f LEFT JOIN leases l ON l.session = f.session "
        "WHERE f.trained_step IS NOT NULL AND f.trained_step IS NOT l.step",
    ),
    _Search(
        Invariant.TRAINED,
        "SELECT session, 'it is trained(' || trained_step || '), and the newest checkpoint is ' || "
        "coalesce('of step ' || (SELECT max(step) FROM checkpoints), 'none') "
        "FROM fates WHERE trained_step > coalesce((SELECT max(step) FROM checkpoints), -1)",
    ),
    _Search(
        Invariant.TRAINED,
        "SELECT session, 'it is still leased for step ' || step || ', which a committed checkpoint holds' "
        "FROM leases WHERE step <= (SELECT max(step) FROM checkpoints) AND session NOT IN (SELECT session FROM fates)",
    ),
)
"""What the bookkeeping can break by itself."""


def check_files(snapshot: Snapshot) -> Iterator[Violation]:
    """SQLite's own checks, of each file."""
    for connection in snapshot:
        name = Path(connection.execute("PRAGMA database_list").fetchone()[2]).name
        for (message,) in connection.execute("PRAGMA main.integrity_check"):
            if message != "ok":
                yield Violation(invariant=Invariant.INTACT, subject=name, detail=message)
        for table, row, referred, _ in connection.execute("PRAGMA main.foreign_key_check"):
            detail = f"it refers to one of {referred} that is not there"
            yield Violation(invariant=Invariant.INTACT, subject=f"row {row} of {table} in {name}", detail=detail)


def check_tables(snapshot: Snapshot) -> Iterator[Violation]:
    """Sessions, leases, fates and checkpoints against each other."""
    yield from _search(snapshot[0], _OF_BOOKKEEPING)
    for connection in snapshot:
        yield from _search(connection, _OF_SESSIONS)
    yield from _check_known(snapshot)
    yield from _check_unique(snapshot, "session", "sessions")
    yield from _check_unique(snapshot, "completion", "completions")


def _search(connection: sqlite3.Connection, searches: Iterable[_Search]) -> Iterator[Violation]:
    for invariant, query in searches:
        for session_id, detail in connection.execute(query):
            yield Violation(invariant=invariant, subject=f"session {session_id!r}", detail=detail)


def _check_known(snapshot: Snapshot) -> Iterator[Violation]:
    for what in ("leases", "fates"):
        for (session_id,) in snapshot[0].execute(f"SELECT session FROM {what}"):
            if not any(reads.standing(connection, session_id) for connection in snapshot):
                detail = f"it is among the {what}, and no file has it"
                yield Violation(invariant=Invariant.KNOWN, subject=f"session {session_id!r}", detail=detail)


def _check_unique(snapshot: Snapshot, noun: str, table: str) -> Iterator[Violation]:
    """A merge of the files' indexes: no more than one id a file is held."""
    by_file = [connection.execute(f"SELECT id FROM {table} ORDER BY id") for connection in snapshot]
    for (earlier,), (later,) in pairwise(heapq.merge(*by_file)):
        if earlier == later:
            yield Violation(invariant=Invariant.UNIQUE, subject=f"{noun} {later!r}", detail="several files have it")


def check_finished(snapshot: Snapshot, counts: LedgerCounts) -> Iterator[Violation]:
    """What a run that says it is completed has left over."""
    try:
        status = questions.note(snapshot, STATUS_NOTE)
    except LedgerError as error:
        yield Violation(invariant=Invariant.READABLE, subject="the notes", detail=str(error))
        return
    if status != "completed":
        return
    left_over = {"open": counts.num_open, "waiting": counts.num_waiting, "leased": counts.num_leased}
    for what, number in left_over.items():
        if number:
            detail = f"it is completed, yet {number} of its sessions are {what}"
            yield Violation(invariant=Invariant.FINISHED, subject="the run", detail=detail)
