"""The invariants that tables can break against each other. Each check is a query that finds the offenders."""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from areal_agent.errors import LedgerError
from areal_agent.ledger import reads
from areal_agent.ledger.invariants import Invariant, Violation
from areal_agent.ledger.records import STATUS_NOTE, LedgerCounts
from areal_agent.types import SessionPurpose


class _Search(NamedTuple):
    """A query of two columns: a session's id and what is wrong with it."""

    invariant: Invariant
    query: str


_SEARCHES = (
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is open, yet leased or of some fate' FROM sessions s "
        "WHERE s.number NOT IN (SELECT session FROM endings) "
        "AND (s.number IN (SELECT session FROM leases) OR s.number IN (SELECT session FROM fates))",
    ),
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is for ' || s.purpose || ', yet leased or of some fate' FROM sessions s "
        f"WHERE s.purpose != '{SessionPurpose.TRAIN}' "
        "AND (s.number IN (SELECT session FROM leases) OR s.number IN (SELECT session FROM fates))",
    ),
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'it is dropped(' || f.dropped || '), yet leased for step ' || l.step "
        "FROM fates f JOIN leases l ON l.session = f.session JOIN sessions s ON s.number = f.session "
        "WHERE f.dropped IS NOT NULL",
    ),
    _Search(
        Invariant.ONE_FATE,
        "SELECT s.id, 'its fate is neither trained nor dropped, or both' "
        "FROM fates f JOIN sessions s ON s.number = f.session "
        "WHERE (f.trained_step IS NULL) = (f.dropped IS NULL)",
    ),
    _Search(
        Invariant.TRAINED,
        "SELECT s.id, 'it is trained(' || f.trained_step || '), yet ' || "
        "coalesce('leased for step ' || l.step, 'never leased') "
        "FROM fates f LEFT JOIN leases l ON l.session = f.session JOIN sessions s ON s.number = f.session "
        "WHERE f.trained_step IS NOT NULL AND f.trained_step IS NOT l.step",
    ),
    _Search(
        Invariant.TRAINED,
        "SELECT s.id, 'it is trained(' || f.trained_step || '), and the newest checkpoint is ' || "
        "coalesce('of step ' || (SELECT max(step) FROM checkpoints), 'none') "
        "FROM fates f JOIN sessions s ON s.number = f.session "
        "WHERE f.trained_step > coalesce((SELECT max(step) FROM checkpoints), -1)",
    ),
    _Search(
        Invariant.TRAINED,
        "SELECT s.id, 'it is still leased for step ' || l.step || ', which a committed checkpoint holds' "
        "FROM leases l JOIN sessions s ON s.number = l.session "
        "WHERE l.step <= (SELECT max(step) FROM checkpoints) AND l.session NOT IN (SELECT session FROM fates)",
    ),
)


def check_file(connection: sqlite3.Connection) -> Iterator[Violation]:
    """SQLite's own checks."""
    for (message,) in connection.execute("PRAGMA integrity_check"):
        if message != "ok":
            yield Violation(invariant=Invariant.INTACT, subject="the file", detail=message)
    for table, row, referred, _ in connection.execute("PRAGMA foreign_key_check"):
        detail = f"it refers to one of {referred} that is not there"
        yield Violation(invariant=Invariant.INTACT, subject=f"row {row} of {table}", detail=detail)


def check_tables(connection: sqlite3.Connection) -> Iterator[Violation]:
    """Leases, fates and checkpoints against each other."""
    for invariant, query in _SEARCHES:
        for session_id, detail in connection.execute(query):
            yield Violation(invariant=invariant, subject=f"session {session_id!r}", detail=detail)


def check_finished(connection: sqlite3.Connection, counts: LedgerCounts) -> Iterator[Violation]:
    """What a run that says it is completed has left over."""
    try:
        status = reads.note(connection, STATUS_NOTE)
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
